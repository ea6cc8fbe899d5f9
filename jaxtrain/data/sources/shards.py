"""Token shards on disk, which `jaxtrain data prepare` writes once and every later run maps into memory.

A folder holds shard-00000.bin, ... (token ids, little-endian uint16 or uint32, nothing else), metadata.json
(`ShardMetadata`) and tokenizer.json.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from jaxtrain.config.base import Group
from jaxtrain.config.data import TokenData
from jaxtrain.data.files import require_file, require_folder, sampled_sha256
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.data.tokens import TokenSource, check_tokens
from jaxtrain.errors import DataError

METADATA = "metadata.json"
TOKENIZER = "tokenizer.json"


class Shard(Group):
    """One file of tokens, with the hash of its content."""

    file: str
    num_tokens: int
    sha256: str


class ShardMetadata(Group):
    """The content of metadata.json, which describes a folder of shards: all ids are below `vocab_size`."""

    format_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    end_of_text: int | None
    """Id that follows each document; null: a newline does."""
    num_tokens: int
    num_documents: int
    tokenizer_sha256: str
    shards: tuple[Shard, ...]
    """The files, in the order of the stream."""


def shard_source(config: TokenData) -> TokenSource:
    """Maps the shards of a folder into memory and checks every id.

    Raises:
        DataError: A file is missing, has another size than metadata.json says, or holds an id outside the vocabulary.
    """
    folder = require_folder(config.path, what="data.path")
    metadata = _read_metadata(folder)
    segments, identity = [], []
    dtype = np.dtype(metadata.dtype).newbyteorder("<")
    for shard in metadata.shards:
        path = require_file(folder / shard.file, what="token shard")
        size, wanted = path.stat().st_size, shard.num_tokens * dtype.itemsize
        if size != wanted:
            raise DataError(
                f"token shard {path} has {size} bytes, {METADATA} says {wanted}; copy it again, or write the folder "
                "again with: jaxtrain data prepare"
            )
        segments.append(np.memmap(path, dtype=dtype, mode="r"))
        if metadata.vocab_size <= np.iinfo(dtype).max:
            check_tokens(segments[-1], metadata.vocab_size, str(path))
        identity.append([shard.file, size, shard.sha256, sampled_sha256(path)])
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    if tokenizer is not None:
        tokenizer.end_of_text = metadata.end_of_text
    return TokenSource(
        segments=tuple(segments),
        vocab_size=metadata.vocab_size,
        tokenizer=tokenizer,
        label=str(folder),
        num_documents=metadata.num_documents,
        identity={"kind": "tokens", "shards": identity, "tokenizer_sha256": metadata.tokenizer_sha256},
    )


def _read_metadata(folder: Path) -> ShardMetadata:
    path = folder / METADATA
    if not path.exists():
        raise DataError(f"data.path {folder} has no {METADATA}; make the folder with: jaxtrain data prepare")
    try:
        return ShardMetadata.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path} is not what jaxtrain data prepare writes ({'.'.join(map(str, first['loc']))}: {first['msg']}); "
            "write the folder again"
        ) from None
