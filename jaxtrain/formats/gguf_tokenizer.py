"""The tokenizer that a GGUF file holds, as the files of a published folder. No jax here.

GGUF keeps a vocabulary, its merges or scores, and the *name* of the rule that divides text into words before them;
`tokenizer.json` spells that rule out. The rules below are those of the published tokenizers of the same names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError
from jaxtrain.formats.chat_template import with_tool_use

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
    "eot_token_id": ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>"),
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
    """Returns the files of a published folder that say what the metadata of a GGUF file does about its tokenizer.

    Name -> text of tokenizer.json, tokenizer_config.json (special tokens, chat template) and generation_config.json;
    nothing where the file (`path`) holds no tokenizer.

    Raises:
        CheckpointError: The tokenizer is of a kind that is not read, or its parts do not fit together.
    """
    if "tokenizer.ggml.model" not in metadata:
        return {}
    try:
        return _Tokenizer(metadata).files()
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path}: its tokenizer cannot be read ({error}); give the model's published tokenizer.json as "
            "data.tokenizer.path"
        ) from None


class _Tokenizer:
    """A tokenizer as the metadata of a GGUF file says it."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.said = {key.removeprefix(_START): value for key, value in metadata.items() if key.startswith(_START)}
        tool_use = metadata.get("tokenizer.chat_template.tool_use")
        self.template = with_tool_use(metadata.get("tokenizer.chat_template", ""), tool_use)
        self.kind, self.tokens = self.said["model"], self.said["tokens"]
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        self.kinds = self.said.get("token_type") or [1] * len(self.tokens)

    def files(self) -> dict[str, str]:
        """Returns name -> text."""
        found = {name: self.said.get(key) for name, key in _SPECIAL.items()}
        special = {name: token for name, token in found.items() if token is not None}
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings.update({name: self.tokens[token] for name, token in special.items()})
        if self.template:
            settings["chat_template"] = self.template
        generation: dict[str, Any] = {f"{name}_id": special[name] for name in _GENERATES if name in special}
        if ends := self.ends():
            generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        parts = {"gpt2": _byte_pairs, "llama": _scored_pieces}[self.kind](self)
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self.added(),
            **parts,
            "post_processor": self.around(),
        }
        return {
            "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2) + "\n",
            "generation_config.json": json.dumps(generation, indent=2) + "\n",
        }

    def ends(self) -> list[int]:
        """Returns the tokens at which the model stops: the end of a text first, then those of turns and messages."""
        found = [self.said.get("eos_token_id")]
        for key, names in _TURN_ENDS.items():
            given = self.said.get(key)
            # Text may spell the name of a token that is no control token.
            named = [i for i, name in enumerate(self.tokens) if name in names and self.kinds[i] == _CONTROL]
            found += named if given is None else [given]
        return [end for end in dict.fromkeys(found) if end is not None]

    def added(self) -> list[dict[str, Any]]:
        """Returns the tokens that are found in a text before it is divided into words."""
        common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": number, "content": token, **common, "special": kind == _CONTROL}
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]

    def around(self) -> dict[str, Any] | None:
        """Returns what adds tokens around each text for those who ask for special tokens; None: nothing does."""
        usual = self.kind == "llama" or self.said.get("pre") in _BEGUN
        before = self.said.get("bos_token_id") if self.said.get("add_bos_token", usual) else None
        after = self.said.get("eos_token_id") if self.said.get("add_eos_token", False) else None
        ends = [i for i in (before, after) if i is not None]
        if not ends:
            return None

        def framed(name: str, kind: int) -> list[dict[str, Any]]:
            def token(number: int | None) -> list[dict[str, Any]]:
                return [] if number is None else [{"SpecialToken": {"id": self.tokens[number], "type_id": kind}}]

            return [*token(before), {"Sequence": {"id": name, "type_id": kind}}, *token(after)]

        return {
            "type": "TemplateProcessing",
            "single": framed("A", 0),
            "pair": [*framed("A", 0), *framed("B", 1)],
            "special_tokens": {
                self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]} for i in ends
            },
        }


_START = "tokenizer.ggml."


def _model(tokens: list[str], merges: list[list[str]], **given: Any) -> dict[str, Any]:
    common = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    common |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", **common, **given, "vocab": vocabulary, "merges": merges}


def _byte_pairs(told: _Tokenizer) -> dict[str, Any]:
    """Returns the parts of a byte-level BPE tokenizer."""
    words = told.said.get("pre")
    if words not in _BPE_WORDS:
        raise ValueError(f"{_START}pre is {words}; supported: {', '.join(_BPE_WORDS)}")
    # Byte-level pieces hold no space, so a merge is two words.
    merges = [str(one).split(" ") for one in told.said["merges"]]
    return {
        "normalizer": _NORMALIZERS.get(words),
        "pre_tokenizer": _BPE_WORDS[words],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(told.tokens, merges, ignore_merges=words in _WHOLE_WORDS),
    }


def _scored_pieces(told: _Tokenizer) -> dict[str, Any]:
    """Returns the parts of a SentencePiece BPE tokenizer, which joins the pair whose piece has the best score first."""
    tokens, numbers = told.tokens, told.numbers
    pairs = []
    for token, score in zip(tokens, told.said["scores"], strict=True):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs += [
            (-score, numbers[left], numbers[right]) for left, right in cuts if left in numbers and right in numbers
        ]
    normalizer: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if told.said.get("add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, normalizer]}
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = told.said.get("unknown_token_id")
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _model(
            tokens,
            [[tokens[left], tokens[right]] for _, left, right in sorted(pairs)],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
