"""The tokenizer that a GGUF file holds, as the files of a published folder. No jax here.

GGUF keeps a vocabulary, its merges or scores, and the *name* of the rule that divides text into words before them;
`tokenizer.json` spells that rule out. The rules below are those of the published tokenizers of the same names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# The names of special tokens in tokenizer_config.json <- the key of their id, spelled as GGUF does.
_SPECIAL = {
    **{"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id"},
    **{"unk_token": "unknown_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id"},
}
# Of these, what generation_config.json numbers.
_GENERATES = ("bos_token", "eos_token", "pad_token")
# What ends a turn or a message beside the end of a text: the key of its id, and the names by which readers of GGUF find
# it in files without the key.
_TURN_ENDS = {
    "eot_token_id": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]"),
    ),
    "eom_token_id": ("<|eom_id|>",),
}

_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_DIGITS_AND_BYTES = {"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(use_regex=True)]}

# tokenizer.ggml.pre -> what divides text into words.
_BPE_WORDS = {
    "gpt-2": _byte_level(use_regex=True),
    "smollm": _DIGITS_AND_BYTES,
    "starcoder": _DIGITS_AND_BYTES,
    "llama-bpe": _words(_LLAMA_WORDS),
    "qwen2": _words(_LLAMA_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")),
}
# A word that is in the vocabulary is one token, even where no merges lead to it.
_WHOLE_WORDS = {"llama-bpe"}
# Files of these rules that do not say whether a text gets a beginning give it one, as all of SentencePiece do.
_BEGUN = {"llama-bpe"}
_NORMALIZERS = {"qwen2": {"type": "NFC"}}


def tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the files of a published folder that say what a GGUF file does about its tokenizer.

    Args:
        path: The GGUF file, for messages.
        metadata: Its metadata.

    Returns:
        Name of the file -> its text: tokenizer.json, tokenizer_config.json (special tokens, chat template) and
        generation_config.json; empty where the file holds no tokenizer.

    Raises:
        CheckpointError: The tokenizer is of a kind that is not read, or its parts do not fit together.
    """
    if "tokenizer.ggml.model" not in metadata:
        return {}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is not a list of tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens holds a token twice")
    special = {name: _token(path, metadata, key, tokens) for name, key in _SPECIAL.items()}
    special = {name: token for name, token in special.items() if token is not None}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings.update({name: tokens[token] for name, token in special.items()})
    if metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    generation: dict[str, Any] = {f"{name}_id": special[name] for name in _GENERATES if name in special}
    ends = _ends(path, metadata, tokens)
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {
        "tokenizer.json": json.dumps(_tokenizer(path, metadata, tokens), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def _token(path: Path, metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    token = metadata.get(f"tokenizer.ggml.{key}")
    if token is not None and not (isinstance(token, int) and 0 <= token < len(tokens)):
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} is {token!r}, but there are {len(tokens)} tokens")
    return token


def _ends(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    """Returns the tokens at which the model stops: the end of a text first, then those of turns and messages."""
    kinds = _numbers(path, metadata, "token_type", [1] * len(tokens), len(tokens))
    found = [_token(path, metadata, "eos_token_id", tokens)]
    for key, names in _TURN_ENDS.items():
        given = _token(path, metadata, key, tokens)
        # Text may spell the name of a token that is no control token.
        named = [i for i, name in enumerate(tokens) if name in names and kinds[i] == _CONTROL]
        found += named if given is None else [given]
    return [end for end in dict.fromkeys(found) if end is not None]


def _tokenizer(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        parts = _byte_pairs(path, metadata, tokens)
    elif kind == "llama":
        parts = _scored_pieces(path, metadata, tokens)
    else:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model is {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are read: "
            "give the model's published tokenizer.json as data.tokenizer.path"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(path, metadata, tokens),
        **parts,
        "post_processor": _around(path, metadata, tokens),
    }


def _added(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    """Returns the tokens that are found in a text before it is divided into words."""
    kinds = _numbers(path, metadata, "token_type", [1] * len(tokens), len(tokens))
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": tokens[number], **common, "special": kind == _CONTROL}
        for number, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED) and tokens[number]
    ]


def _numbers(path: Path, metadata: Mapping[str, Any], key: str, default: list | None, count: int) -> list:
    """Returns one number per token."""
    found = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(found, list) or len(found) != count or not all(type(one) in (int, float) for one in found):
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} does not hold one number per token ({count})")
    return found


def _around(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Returns what adds tokens around each text for those who ask for special tokens; None: nothing does."""
    usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGUN
    places = {}
    for key, id_key, default in (
        ("add_bos_token", "bos_token_id", usual),
        ("add_eos_token", "eos_token_id", False),
    ):
        token = _token(path, metadata, id_key, tokens)
        places[key] = None if not metadata.get(f"tokenizer.ggml.{key}", default) else token
    before, after = places["add_bos_token"], places["add_eos_token"]
    if before is None and after is None:
        return None

    def framed(name: str, kind: int) -> list[dict[str, Any]]:
        around = [[] if i is None else [{"SpecialToken": {"id": tokens[i], "type_id": kind}}] for i in (before, after)]
        return [*around[0], {"Sequence": {"id": name, "type_id": kind}}, *around[1]]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": [*framed("A", 0), *framed("B", 1)],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (before, after) if i is not None
        },
    }


def _model(tokens: list[str], merges: list[list[str]], **given: Any) -> dict[str, Any]:
    common = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    common |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", **common, **given, "vocab": vocabulary, "merges": merges}


def _byte_pairs(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Returns the parts of a byte-level BPE tokenizer."""
    words = metadata.get("tokenizer.ggml.pre")
    if words not in _BPE_WORDS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {words!r}; the ways to divide text into words that are known are "
            f"{', '.join(_BPE_WORDS)}: give the model's published tokenizer.json as data.tokenizer.path"
        )
    # Byte-level pieces hold no space, so a merge is two words.
    merges = [str(one).split(" ") for one in metadata.get("tokenizer.ggml.merges") or []]
    known = set(tokens)
    wrong = next((one for one in merges if len(one) != 2 or not known.issuperset((*one, "".join(one)))), None)
    if wrong is not None or not merges:
        told = (
            "tokenizer.ggml.merges is missing" if wrong is None else f"the merge {' '.join(wrong)!r} is not of tokens"
        )
        raise CheckpointError(f"{path}: {told}")
    return {
        "normalizer": _NORMALIZERS.get(words),
        "pre_tokenizer": _BPE_WORDS[words],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(tokens, merges, ignore_merges=words in _WHOLE_WORDS),
    }


def _scored_pieces(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Returns the parts of a SentencePiece BPE tokenizer, which joins the pair whose piece has the best score first."""
    scores = _numbers(path, metadata, "scores", None, len(tokens))
    numbers = {token: number for number, token in enumerate(tokens)}
    pairs = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs += [
            (-score, numbers[left], numbers[right]) for left, right in cuts if left in numbers and right in numbers
        ]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unknown = _token(path, metadata, "unknown_token_id", tokens)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
        if prefix
        else spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*back, strip] if prefix else back},
        "model": _model(
            tokens,
            [[tokens[left], tokens[right]] for _, left, right in sorted(pairs)],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
