"""Tokenizers, from text to token ids and back: bytes, byte-level BPE trained on the data, or a saved tokenizer.json."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data.end_of_text import save_end
from jaxtrain.data.files import require_file
from jaxtrain.data.special import END_KEY, names_beside
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.interop.formats.gguf import read_gguf
from jaxtrain.interop.formats.gguf_tokenizer import tokenizer_files

END_OF_TEXT = "<|endoftext|>"

# Names of the token between documents in published tokenizers, in the order in which they are tried.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")

# Statistics of pairs stop changing long before this; the cap bounds memory and time on a large corpus.
_TRAINING_CHARACTERS = 64 * 2**20

# Documents are divided into pieces of about this size, so that one long document still uses every core.
_PIECE_CHARACTERS = 32 * 2**10

# Byte-level BPE never merges across a single newline between two words, so dividing a text there does not change the
# ids (`_can_cut` says for which tokenizers).
_SAFE_CUT = re.compile(r"(?<=\S)\n(?=\S)")


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


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes of UTF-8; documents end with a newline, for lack of another id.

    Args:
        special: Names of special tokens, which have the ids from 256 on.
    """

    end_of_text: int | None = None

    def __init__(self, special: Sequence[str] = ()):
        self.special = tuple(special)
        self.vocab_size: int = 256 + len(self.special)

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

    def token_id(self, name: str) -> int | None:
        """Returns the id of a special token; None: there is no such token."""
        return 256 + self.special.index(name) if name in self.special else None

    def special_ids(self) -> list[int]:
        """Returns the ids that no text has."""
        return list(range(256, self.vocab_size))

    def save(self, path: Path) -> None:
        path.write_text(_serialize(self), encoding="utf-8")


class BpeTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        model: A `tokenizers.Tokenizer`; its padding, truncation and BPE dropout are switched off.

    Attributes:
        usual_end: The id that published tokenizers usually end a text with; None: it has none of their names.
        end_of_text: Id that follows each document: the usual one, unless a file or a config says otherwise.
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
        self._can_cut = _can_cut(model)
        known = (model.token_to_id(name) for name in _END_OF_TEXT_NAMES)
        self.usual_end: int | None = next((i for i in known if i is not None), None)
        self.end_of_text: int | None = self.usual_end

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [num_tokens], encoded on all cores."""
        pieces: list[str] = []
        counts = []
        for text in texts:
            cut = list(_pieces(text)) if self._can_cut else [text]
            pieces += cut
            counts.append(len(cut))
        try:
            encoded = iter(self._model.encode_batch_fast(pieces, add_special_tokens=False))
        except UnicodeEncodeError as error:
            raise _half_character(error) from None
        return [
            np.concatenate(
                [np.array(next(encoded).ids, dtype=np.int32) for _ in range(count)] or [np.zeros(0, np.int32)]
            )
            for count in counts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for i in map(int, ids):
            if 0 <= i < self.vocab_size:
                run.append(i)
            else:
                parts += [self._model.decode(run, skip_special_tokens=False), "\ufffd"]
                run = []
        return "".join([*parts, self._model.decode(run, skip_special_tokens=False)])

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
        """Returns what the file's post-processor puts around a text, or around two.

        Args:
            pair: Whether there are two texts.

        Returns:
            (id of a special token, or "first" or "second" for a text; token type) in their order.
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
        save_end(self, path)

    def to_json(self) -> str:
        return self._model.to_str()


def _with_end(tokenizer: Tokenizer, name: str | None) -> Tokenizer:
    """Sets the end of text that `data.tokenizer.end` names; bytes end documents with a newline whatever it is."""
    if name is not None and isinstance(tokenizer, BpeTokenizer):
        end = tokenizer.token_id(name)
        if end is None:
            raise DataError(f"data.tokenizer.end={name!r} is no token of the tokenizer; give the name of one")
        tokenizer.end_of_text = end
    return tokenizer


def _can_cut(model: Any) -> bool:
    """Returns whether a document in the pieces of `_pieces` has the same ids as the document in one piece.

    This is true only of tokenizers that are known to make a single newline a word of its own: another pre-tokenizer,
    normalizer or option may join it to its neighbours, or treat the start of a text in a special way.
    """
    from tokenizers import pre_tokenizers

    splitter = model.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.ByteLevel) or model.normalizer is not None:
        return False
    # add_prefix_space puts a space before every piece; without use_regex, merges cross the newline.
    if splitter.add_prefix_space or not splitter.use_regex:
        return False
    # Added tokens are found in the text before it is split into words; special ones are not (encode_special_tokens).
    added = model.get_added_tokens_decoder().values()
    return not any("\n" in token.content or token.lstrip or token.rstrip for token in added if not token.special)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        found = _SAFE_CUT.search(text, start + _PIECE_CHARACTERS)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer.json that jaxtrain or the `tokenizers` library saved, or the tokenizer of a GGUF file.

    Its end of text is the `eos_token` of the tokenizer_config.json beside it, or else a token with a usual name.

    Raises:
        DataError: The file is missing or is not a tokenizer.
        CheckpointError: It is a GGUF file that is damaged, or its tokenizer is of a kind that is not read.
    """
    path = require_file(path, what="tokenizer")
    try:
        text = _gguf_text(path) if path.suffix == ".gguf" else path.read_text(encoding="utf-8")
    except ValueError as error:
        raise _not_json(path, error) from None
    tokenizer = load_tokenizer_text(text, path)
    named = tokenizer.token_id(names_beside(path).get(END_KEY, "")) if isinstance(tokenizer, BpeTokenizer) else None
    if named is not None:
        tokenizer.end_of_text = named
    return tokenizer


def load_tokenizer_text(text: str, where: str | Path) -> ByteTokenizer | BpeTokenizer:
    """Makes the tokenizer of the text of a tokenizer.json; see `load_tokenizer`.

    Args:
        text: The text.
        where: Names it in messages.

    Raises:
        DataError: It is not that of a tokenizer.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _not_json(where, error) from None
    if isinstance(content, dict) and content.get("jaxtrain_tokenizer") == "byte":
        return ByteTokenizer(content.get("special", ()))
    from tokenizers import Tokenizer as Model

    try:
        model = Model.from_str(text)
    except Exception as error:  # The library raises bare Exception.
        reason = str(error).splitlines()[0]
        raise DataError(f"tokenizer {where} is not a tokenizer of the tokenizers library ({reason})") from None
    return BpeTokenizer(model)


def _not_json(where: str | Path, error: ValueError) -> DataError:
    return DataError(f"tokenizer {where} is not JSON ({error}); give a tokenizer.json")


def _gguf_text(path: Path) -> str:
    files = tokenizer_files(path, read_gguf(path).metadata)
    if "tokenizer.json" not in files:
        raise DataError(f"{path} holds no tokenizer; give the model's published tokenizer.json")
    return files["tokenizer.json"]


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str], *, special: Sequence[str] = ()) -> Tokenizer:
    """Makes the tokenizer of `config`.

    Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2) depends only on the texts: the same
    texts in the same order give the same ids. It is trained on the first 64 Mi characters.

    Args:
        config: Which tokenizer.
        texts: Documents to train on; read only for kind bpe.
        special: Names of special tokens that the rows take; they are the last ids of a tokenizer that is made here.

    Raises:
        ConfigError: The vocabulary has no room for special tokens.
        DataError: Kind is file and the path is missing or is not a tokenizer, or the config names an end of text that
            is no token.
    """
    if config.kind == "byte":
        return ByteTokenizer(special)
    if config.kind == "file":
        if config.path is None:
            raise DataError("data.tokenizer.kind is file but data.tokenizer.path is null; set it to a tokenizer.json")
        return _with_end(load_tokenizer(config.path), config.end)
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if config.vocab_size < 257 + len(special):
        raise ConfigError(
            f"data.tokenizer.vocab_size={config.vocab_size} has no room for 256 bytes, the end of text and "
            f"{len(special)} special tokens; set it to {257 + len(special)} or more"
        )
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] a setter
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] a setter
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - len(special),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    try:
        model.train_from_iterator(_capped(texts), trainer)
    except UnicodeEncodeError as error:
        raise _half_character(error) from None
    if special:
        model.add_special_tokens(list(special))
    return _with_end(BpeTokenizer(model), config.end)


def _half_character(error: UnicodeEncodeError) -> DataError:
    near = ascii(error.object[max(0, error.start - 20) : error.start + 20])
    return DataError(
        f"a text has half a character (a lone surrogate) in {near}, which no BPE tokenizer reads; fix or remove it"
    )


def _capped(texts: Iterable[str]) -> Iterator[str]:
    left = _TRAINING_CHARACTERS
    for text in texts:
        for piece in _pieces(text):
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return
