"""Documents in blocks, which are encoded apart from each other: the same blocks whatever the number of processes."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.config.data import DocumentsData, JsonlData
from jaxtrain.data.compression import UNPACKING_ERRORS, damaged, open_unpacked
from jaxtrain.data.files import MAX_LINE_BYTES, file_state, find_files
from jaxtrain.data.formats.opened import DataFile, find_rows, open_file
from jaxtrain.data.formats.parquet import ParquetReader
from jaxtrain.data.formats.reader import pass_over
from jaxtrain.data.skipped import NAMED, BadRecordError, without_advice
from jaxtrain.data.sources.texts import TextSource, text_of_row
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.data.tokens import divided, encode_stream, line_document, open_documents, read_document, token_dtype
from jaxtrain.errors import DataError

# Text of a block: enough to use a process for a second, and little enough that several wait in memory.
BLOCK_BYTES = 2**24
_LINE_END = b"\n"


@dataclass(frozen=True)
class Block:
    """A part of the documents.

    Attributes:
        position: Bytes of all files up to its end.
        texts: The documents themselves; None: they are read from the following.
        lines: (file, number of the first line, its first byte, the lines) of JSON lines.
        files: Files of one document each.
        rows: (file, first row, end) of a file that is read by row.
    """

    position: int
    texts: tuple[str, ...] | None = None
    lines: tuple[Path, int, int, bytes] | None = None
    files: tuple[DataFile, ...] = ()
    rows: tuple[DataFile, int, int] | None = None


@dataclass(frozen=True)
class Encoded:
    """A block as tokens.

    Attributes:
        tokens: uint16 or uint32 [num_tokens].
        num_documents: Documents in it.
        num_bad: Records that were left out.
        named: What is wrong with the first of them.
    """

    tokens: np.ndarray
    num_documents: int
    num_bad: int
    named: tuple[str, ...]


def source_files(config: TextSource) -> tuple[DataFile, ...]:
    """Returns the files of a source; none where its text is built in.

    Raises:
        DataError: A file is missing, empty or of no known format.
    """
    if config.path is None:
        return ()
    if isinstance(config, DocumentsData):
        return find_rows(config.path, what="data.path")
    suffix, form = (".jsonl", "lines") if isinstance(config, JsonlData) else (".txt", "text")
    return tuple(DataFile(name, file_state(path), form) for name, path in find_files(config.path, suffix=suffix))


def blocks_of(config: TextSource, files: Sequence[DataFile]) -> Iterator[Block]:
    """Divides the documents of a source into blocks.

    Args:
        config: Which text.
        files: Its files, as `source_files` lists them.

    Yields:
        The blocks in the order of the documents, each of about 16 MiB of text; a document is never divided.

    Raises:
        DataError: A file cannot be read, or is damaged.
    """
    if not files:
        yield from _builtin_blocks(config)
        return
    done = 0
    together: list[DataFile] = []
    for file in files:
        if file.format == "text":
            together.append(file)
            done += file.state.num_bytes
            if sum(one.state.num_bytes for one in together) >= BLOCK_BYTES:
                yield Block(done, files=tuple(together))
                together = []
            continue
        if file.format == "lines":
            yield from _line_blocks(file, done)
        else:
            yield from _row_blocks(file, _field(config), done)
        done += file.state.num_bytes
    if together:
        yield Block(done, files=tuple(together))


def _field(config: TextSource) -> str:
    return config.field if isinstance(config, JsonlData | DocumentsData) else "text"


def _builtin_blocks(config: TextSource) -> Iterator[Block]:
    assert not isinstance(config, DocumentsData)
    texts: list[str] = []
    size = done = 0
    for text in open_documents(config).read():
        texts.append(text)
        size += len(text)
        if size >= BLOCK_BYTES // 4:
            done += size
            yield Block(done, texts=tuple(texts))
            texts, size = [], 0
    if texts:
        yield Block(done + size, texts=tuple(texts))


def _line_blocks(file: DataFile, done: int) -> Iterator[Block]:
    number, offset = 1, 0
    try:
        with open_unpacked(file.path) as (content, packed):
            while lines := content.read(BLOCK_BYTES):
                if not lines.endswith(_LINE_END):
                    rest = content.readline(MAX_LINE_BYTES + 1)
                    if len(rest) > MAX_LINE_BYTES:
                        where = f"{file.path}:{number + lines.count(_LINE_END)}"
                        raise DataError(
                            f"{where} is a line of more than {MAX_LINE_BYTES:,} bytes; write one record per line"
                        )
                    lines += rest
                yield Block(done + packed.tell(), lines=(file.path, number, offset, lines))
                number, offset = number + lines.count(_LINE_END), offset + len(lines)
    except UNPACKING_ERRORS as error:
        raise damaged(file.path, error) from None
    file.state.check()


def _row_blocks(file: DataFile, field: str, done: int) -> Iterator[Block]:
    reader = open_file(file, [("field", field)])
    num_rows = len(reader)
    # A row group is decoded whole, so that blocks end where groups do.
    starts = reader.group_starts if isinstance(reader, ParquetReader) else range(num_rows)
    bytes_per_row = file.state.num_bytes / max(num_rows, 1)
    first = 0
    for end in [*starts[1:], num_rows]:
        if (end - first) * bytes_per_row >= BLOCK_BYTES or (end == num_rows and end > first):
            yield Block(done + int(end * bytes_per_row), rows=(file, first, end))
            first = end


def encode_block(block: Block, config: TextSource, tokenizer: Tokenizer) -> Encoded:
    """Reads and encodes the documents of a block.

    Args:
        block: Which part of the documents.
        config: Where they are from; with on_bad_record=skip, bad records are left out and counted.
        tokenizer: Makes the ids.

    Raises:
        DataError: A record is bad and may not be skipped, or a file changed or is damaged.
    """
    skips = isinstance(config, JsonlData | DocumentsData) and config.on_bad_record == "skip"
    named: list[str] = []
    num_bad = 0

    def leave_out(error: BadRecordError) -> None:
        nonlocal num_bad
        if not skips:
            raise error
        num_bad += 1
        if len(named) < NAMED:
            named.append(without_advice(error))

    texts = divided(config, _texts_of(block, _field(config), leave_out), tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    found = [ids for chunk in encode_stream(texts, tokenizer) for ids in chunk]
    tokens = np.concatenate(found).astype(dtype, copy=False) if found else np.zeros(0, dtype)
    return Encoded(tokens, len(found), num_bad, tuple(named))


def _texts_of(block: Block, field: str, bad: Callable[[BadRecordError], None]) -> Iterator[str]:
    """Yields the documents of a block; `bad` is called for each record that is none, and may raise."""
    if block.texts is not None:
        yield from block.texts
    elif block.lines is not None:
        path, number, offset, content = block.lines
        for line in io.BytesIO(content):
            try:
                text = line_document(line, field=field, path=path, number=number, offset=offset)
            except BadRecordError as error:
                bad(error)
                text = None
            number, offset = number + 1, offset + len(line)
            if text is not None:
                yield text
    elif block.rows is not None:
        file, first, end = block.rows
        for where, row in pass_over(open_file(file, [("field", field)]), first, end, bad=bad):
            try:
                text = text_of_row(row, field, where=where)
            except BadRecordError as error:
                bad(error)
                continue
            yield text
    else:
        yield from (read_document(file.state) for file in block.files)
