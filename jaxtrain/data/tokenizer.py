"""Tokenizers, from text to token ids and back: bytes, byte-level BPE trained on the data, or a saved tokenizer.json."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data.files import reading, require_file
from jaxtrain.errors import DataError, first_line
from jaxtrain.formats.gguf import read_gguf
from jaxtrain.formats.gguf_tokenizer import tokenizer_files
from jaxtrain.runtime.files import write_bytes_atomic

END_OF_TEXT = "<|endoftext|>"

# Names of the token between documents in published tokenizers, in the order in which they are tried.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")

# Files beside a published tokenizer.json: the template of chats, names of special tokens, and where a model stops.
TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
OLDER_SETTINGS_FILE, GENERATION_FILE = "special_tokens_map.json", "generation_config.json"
CONFIG_FILE, _STOPS = "config.json", "eos_token_id"

# Role -> the key of tokenizer_config.json, and the names that published tokenizers give it, in the order of trying.
_ROLES = {
    "start": ("cls_token", "[CLS]", "<s>"),
    "end": ("sep_token", "[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "mask": ("mask_token", "[MASK]", "<mask>"),
    "padding": ("pad_token", "[PAD]", "<pad>"),
}

# Statistics of pairs stop changing long before this; the cap bounds memory and time on a large corpus.
_TRAINING_CHARACTERS = 64 * 2**20


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into token ids and back.

    Attributes:
        vocab_size: One more than the largest id.
        end_of_text: Id that follows each document; None: the tokenizer has none.
    """

    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [num_tokens]."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 and unknown ids become U+FFFD."""
        ...

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json that `load_tokenizer` reads, and beside it the name of an unusual end of text."""
        ...


class NumberedTokens:
    """Special tokens of these names above `num_ids` ids of data that no tokenizer made."""

    def __init__(self, num_ids: int, special: Sequence[str]):
        self._num_ids, self.special = num_ids, tuple(special)
        self.vocab_size: int = num_ids + len(self.special)

    def token_id(self, name: str) -> int | None:
        """Returns the id of a special token; None: there is no such token."""
        return self._num_ids + self.special.index(name) if name in self.special else None

    def special_ids(self) -> list[int]:
        """Returns the ids that no text has."""
        return list(range(self._num_ids, self.vocab_size))


class ByteTokenizer(NumberedTokens):
    """Bytes of UTF-8 as the ids 0 to 255; documents end with a newline, for lack of another id.

    The ids from 256 on are special tokens of these names.
    """

    end_of_text: int | None = None

    def __init__(self, special: Sequence[str] = ()):
        super().__init__(256, special)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        # 0xFF never occurs in UTF-8, so an id that is not a byte decodes to U+FFFD.
        parts = (self._bytes(int(i)) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def _bytes(self, i: int) -> bytes:
        if 256 <= i < self.vocab_size:
            return self.special[i - 256].encode()
        return bytes([i if 0 <= i < 256 else 0xFF])

    def save(self, path: Path) -> None:
        path.write_text(_serialize(self), encoding="utf-8")


@contextlib.contextmanager
def encoding() -> Iterator[None]:
    """A context in which the tokenizers library encodes: what it raises becomes a DataError of one line."""
    try:
        yield
    except BaseException as error:  # it raises bare Exception, and a panic of Rust is none
        if isinstance(error, KeyboardInterrupt):
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"the tokenizer fails on a text ({reason}); use another one, or repair its file") from None


class BpeTokenizer:
    """A tokenizer of the `tokenizers` library; its padding, truncation and BPE dropout are switched off.

    `usual_end` is the id that published tokenizers usually end a text with; `end_of_text` follows each document, and is
    the usual one unless a file or a config says otherwise.
    """

    def __init__(self, model: Any):
        from tokenizers import models

        # A file may contain the padding and truncation of the job that it was saved for.
        model.no_padding()
        model.no_truncation()
        # Text that happens to spell a special token is data, not a document boundary.
        model.encode_special_tokens = True
        if isinstance(model.model, models.BPE) and model.model.dropout:
            # Random merges (BPE-dropout) would give the same text other ids on each pass and in each process.
            model.model.dropout = None
        self._model = model
        # The number of entries is not enough: published vocabularies have gaps.
        self.vocab_size: int = max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size > 2**31:
            raise ValueError(f"it has an id of {self.vocab_size - 1}, and ids are of 31 bits")
        known = (model.token_to_id(name) for name in _END_OF_TEXT_NAMES)
        self.usual_end: int | None = next((i for i in known if i is not None), None)
        self.end_of_text: int | None = self.usual_end

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [num_tokens], encoded on all cores."""
        with encoding():
            encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        # Ids from a model whose vocabulary is larger become U+FFFD.
        runs = itertools.groupby(map(int, ids), key=lambda i: 0 <= i < self.vocab_size)
        parts = (
            self._model.decode(list(run), skip_special_tokens=False) if known else "\ufffd" * len(list(run))
            for known, run in runs
        )
        return "".join(parts)

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token; None: there is no such token."""
        return self._model.token_to_id(name)

    def token_name(self, token: int) -> str | None:
        """Returns the name of a token; None: there is no such token."""
        return self._model.id_to_token(token)

    def special_ids(self) -> list[int]:
        """Returns the ids that no text has."""
        return sorted(i for i, token in self._model.get_added_tokens_decoder().items() if token.special)

    def frame(self, *, pair: bool) -> list[tuple[int | str, int]]:
        """Returns what the file's post-processor puts around a text, or around two, in their order.

        An entry is (id of a special token, or "first" or "second" for a text; token type).
        """
        if self._model.post_processor is None:
            return [("first", 0), ("second", 1)] if pair else [("first", 0)]
        framed = self._model.encode("a", "a" if pair else None)
        found: list[tuple[int | str, int]] = []
        for i, sequence, kind in zip(framed.ids, framed.sequence_ids, framed.type_ids, strict=True):
            entry = (i if sequence is None else ("first", "second")[sequence], kind)
            if sequence is None or entry not in found:  # a text may be of several tokens
                found.append(entry)
        return found

    def save(self, path: Path) -> None:
        path.write_text(_serialize(self), encoding="utf-8")
        if named_end(self):
            # A tokenizer.json has no place for it.
            names = {"eos_token": self.token_name(self.end_of_text or 0)}
            write_bytes_atomic(path.with_name(OLDER_SETTINGS_FILE), json.dumps(names, ensure_ascii=False).encode())

    def to_json(self) -> str:
        return self._model.to_str()


def _serialize(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, BpeTokenizer):
        return tokenizer.to_json()
    content: dict[str, Any] = {"jaxtrain_tokenizer": "byte", "format_version": 1}
    if isinstance(tokenizer, ByteTokenizer) and tokenizer.special:
        content["special"] = list(tokenizer.special)
    return json.dumps(content) + "\n"


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """Returns a hash of everything that the ids depend on."""
    return hashlib.sha256(_serialize(tokenizer).encode()).hexdigest()


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text, on all cores where the tokenizer can."""
    if isinstance(tokenizer, BpeTokenizer):
        return tokenizer.encode_all(texts)
    return [tokenizer.encode(text) for text in texts]


def chunks(found: Iterable[Any], size_of: Callable[[Any], int], *, most: int) -> Iterator[list[Any]]:
    """Yields what is found in lists whose sizes add up to `most` or a little more."""
    chunk: list[Any] = []
    size = 0
    for one in found:
        chunk.append(one)
        size += size_of(one)
        if size >= most:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer.json that jaxtrain or the `tokenizers` library saved, or the tokenizer of a GGUF file.

    Its end of text is the `eos_token` of the files beside it, or else a token with a usual name.

    Raises:
        DataError: The file is missing or is not a tokenizer.
        CheckpointError: It is a GGUF file that is damaged, or its tokenizer is of a kind that is not read.
    """
    path = require_file(path, what="tokenizer")
    files = files_beside(path)
    tokenizer = load_tokenizer_text(files.get("tokenizer.json", "{}") if path.suffix == ".gguf" else _text(path), path)
    named = tokenizer.token_id(special_names(files).get("eos_token", ""))
    if named is not None and isinstance(tokenizer, BpeTokenizer):
        tokenizer.end_of_text = named
    return tokenizer


def load_tokenizer_text(text: str, where: str | Path) -> ByteTokenizer | BpeTokenizer:
    """Makes the tokenizer of the text of a tokenizer.json, which `where` names; see `load_tokenizer`."""
    from tokenizers import Tokenizer as Model

    try:
        content = json.loads(text)
        if isinstance(content, dict) and content.get("jaxtrain_tokenizer") == "byte":
            return ByteTokenizer(content.get("special", ()))
        return BpeTokenizer(Model.from_str(text))
    except Exception as error:  # The library raises bare Exception.
        reason = first_line(error)
        raise DataError(f"tokenizer {where} is not a tokenizer of the tokenizers library ({reason})") from None


def files_beside(tokenizer: Path) -> dict[str, str]:
    """Returns name -> text of the small files beside a tokenizer.json, or of all that a GGUF file holds."""
    tokenizer = tokenizer.expanduser()
    if tokenizer.suffix == ".gguf":
        return tokenizer_files(tokenizer, read_gguf(tokenizer).metadata)
    names = (TEMPLATE_FILE, SETTINGS_FILE, OLDER_SETTINGS_FILE, GENERATION_FILE, CONFIG_FILE)
    paths = {name: tokenizer.with_name(name) for name in names}
    files = {name: _text(path) for name, path in paths.items() if path.is_file()}
    config = json_beside(files, CONFIG_FILE)
    files.pop(CONFIG_FILE, None)
    # Older folders, and converted ones, say in config.json where the model stops.
    for settings in (config, config.get("text_config")):
        generation = json_beside(files, GENERATION_FILE)
        if isinstance(settings, dict) and generation.get(_STOPS) is None and settings.get(_STOPS) is not None:
            files[GENERATION_FILE] = json.dumps({**generation, _STOPS: settings[_STOPS]})
    return files


def json_beside(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Returns the object in one of `files_beside`; empty where there is none."""
    with reading(f"{name} beside the tokenizer"):
        found = json.loads(files.get(name, "{}"))
    return found if isinstance(found, dict) else {}


def special_names(files: Mapping[str, str]) -> dict[str, str]:
    """Returns key (eos_token) -> name of the special tokens that `files_beside` give."""
    settings = {**json_beside(files, OLDER_SETTINGS_FILE), **json_beside(files, SETTINGS_FILE)}
    names = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: name for key, name in names.items() if key.endswith("_token") and isinstance(name, str)}


def _text(path: Path) -> str:
    with reading(path):
        return path.read_text(encoding="utf-8")


def described(tokenizer: Tokenizer) -> str:
    """Returns a line about a tokenizer."""
    kind = "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokenizer of the tokenizers library"
    return f"tokenizer: {kind}, {tokenizer.vocab_size:,} ids"


def named_end(tokenizer: Any) -> dict[str, int]:
    """Returns the end of text as an entry of an identity where it is not the usual one, else nothing."""
    if not isinstance(tokenizer, BpeTokenizer) or tokenizer.end_of_text in (tokenizer.usual_end, None):
        return {}
    return {"end_of_text": tokenizer.end_of_text}


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str], *, special: Sequence[str] = ()) -> Tokenizer:
    """Makes the tokenizer of `config`.

    Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2) depends only on the texts: the same
    texts in the same order give the same ids. It is trained on the first 64 Mi characters.

    Args:
        config: Which tokenizer.
        texts: Documents to train on; read only for kind bpe.
        special: Names of special tokens that the rows take; they are the last ids of a tokenizer that is made here.

    Raises:
        DataError: Kind is file and the path is missing or is not a tokenizer, or the config names an end of text that
            is no token.
    """
    if config.kind == "byte":
        return ByteTokenizer(special)
    if config.kind == "bpe":
        tokenizer = _trained(texts, vocab_size=config.vocab_size, special=special)
    elif config.path is None:
        raise DataError("data.tokenizer.kind is file but data.tokenizer.path is null; set it to a tokenizer.json")
    else:
        tokenizer = load_tokenizer(config.path)
    if config.end is not None and isinstance(tokenizer, BpeTokenizer):
        tokenizer.end_of_text = special_ids(tokenizer, config).end
    return tokenizer


def _trained(texts: Iterable[str], *, vocab_size: int, special: Sequence[str]) -> "BpeTokenizer":
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] a setter
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] a setter
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_capped(texts), trainer)
    model.add_special_tokens(list(special))
    return BpeTokenizer(model)


def _capped(texts: Iterable[str]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


# Whatever has special tokens with names.
NamedTokens = NumberedTokens | BpeTokenizer


@dataclass(frozen=True)
class SpecialIds:
    """Ids of what begins a row of an encoder, ends a text, hides a token and fills rows up; None: no such token."""

    start: int | None
    end: int | None
    mask: int | None
    padding: int | None


def special_ids(tokenizer: NamedTokens, config: TokenizerConfig | None) -> SpecialIds:
    """Finds the special tokens of a tokenizer: those of the config, of the files beside it, or with the usual names."""
    config = config or TokenizerConfig()
    listed: dict[str, str] = {}
    if config.kind == "file" and config.path is not None:
        # A run keeps the end of text in the other file, and evaluates with the frame that it was trained with.
        files = files_beside(Path(config.path))
        listed = special_names({SETTINGS_FILE: files.get(SETTINGS_FILE, "{}")})
        listed.setdefault("sep_token", listed.get("eos_token", ""))
    found = {}
    for role, (key, *names) in _ROLES.items():
        given = getattr(config, role)
        tried = [listed.get(key, ""), *names] if given is None else [given]
        found[role] = next((i for i in map(tokenizer.token_id, tried) if i is not None), None)
        if given is not None and found[role] is None:
            raise DataError(f"data.tokenizer.{role}={given!r} is not a token of the tokenizer; give the name of one")
    return SpecialIds(**found)


def needed(found: int | None, role: str, *, what: str) -> int:
    """Returns the id of a special token that `what` takes; a DataError where there is none for this role."""
    if found is None:
        raise DataError(
            f"{what} needs a {role} token, and the tokenizer has none of {', '.join(_ROLES[role][1:])}; "
            f"set data.tokenizer.{role} to a token that it has, or use data.tokenizer.kind=bpe"
        )
    return found
