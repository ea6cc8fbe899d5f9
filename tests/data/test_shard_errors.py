"""Every mistake with prepared token shards is one line: what is wrong, where, what would work."""

import re

import numpy as np
import pytest

from jaxtrain.config.data import Component, MixtureData, TextData, TokenData, TokenizerConfig
from jaxtrain.data import open_data, prepare_tokens
from jaxtrain.errors import DataError


def text(path, **settings):
    return TextData(path=str(path), **settings)


def prepared(tmp_path, **settings):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 30)
    output = tmp_path / "shards"
    prepare_tokens(text(path, **settings), output, tokens_per_shard=100)
    return output


def open_shards(folder):
    return open_data(TokenData(path=str(folder)), sequence_length=16, seed=0)


def test_a_token_out_of_range_names_file_and_position(tmp_path):
    folder = prepared(tmp_path)
    shard = folder / "shard-00001.bin"
    tokens = np.fromfile(shard, "<u2")
    tokens[37] = 300
    tokens.tofile(shard)
    message = (
        f"{shard}: token 300 at position 37 is outside the vocabulary of 256; "
        "use the tokenizer the data was made with, or a model with a larger vocab_size"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_shards(folder)


def test_a_truncated_shard_names_both_sizes(tmp_path):
    folder = prepared(tmp_path)
    shard = folder / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = (
        f"token shard {shard} has 199 bytes, metadata.json says 200; "
        "copy it again, or write the folder again with: jaxtrain data prepare"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_shards(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = prepared(tmp_path)
    (folder / "shard-00002.bin").unlink()
    with pytest.raises(DataError, match=r"^token shard .*/shard-00002\.bin does not exist; the nearest existing path"):
        open_shards(folder)


def test_preparing_over_a_folder_is_refused(tmp_path):
    folder = prepared(tmp_path)
    with pytest.raises(DataError, match=f"^output {re.escape(str(folder))} exists; give another folder, or remove it$"):
        prepare_tokens(text(tmp_path / "a.txt"), folder, tokens_per_shard=100)


def test_shards_of_another_tokenizer_do_not_mix(tmp_path):
    folder = prepared(tmp_path, tokenizer=TokenizerConfig(kind="bpe", vocab_size=260))
    config = MixtureData(
        components=(Component(source=TokenData(path=str(folder))), Component(source=text(tmp_path / "a.txt")))
    )
    message = (
        f"{folder} was made with another tokenizer than the rest of the mixture; "
        f"set data.tokenizer.kind=file data.tokenizer.path={folder}/tokenizer.json, or prepare it again"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_data(config, sequence_length=16, seed=0)
