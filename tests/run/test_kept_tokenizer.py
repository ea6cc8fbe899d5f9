"""The tokenizer of a run is intact, or one line; the end of documents is kept with it."""

from pathlib import Path

import pytest

from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.errors import DataError
from jaxtrain.run.directory import TOKENIZER_DIGEST, TOKENIZER_FILE
from jaxtrain.run.published import keep_tokenizer, read_tokenizer


def test_a_tokenizer_that_is_damaged_or_gone(tmp_path: Path) -> None:
    tokenizer, path = ByteTokenizer(["<a>"]), tmp_path / TOKENIZER_FILE
    info = {TOKENIZER_DIGEST: keep_tokenizer(tmp_path, tokenizer)}
    found = read_tokenizer(tmp_path, info)
    assert isinstance(found, ByteTokenizer)
    assert found.special == ("<a>",)
    path.write_text('{"jaxtrain_tokenizer": "byte", "special": ["<x>"]}')
    for state in ("is damaged, or not the run's", "is gone"):
        with pytest.raises(
            DataError, match=rf"tokenizer\.json {state}.*; run 'jaxtrain train .*' again, which writes it"
        ):
            read_tokenizer(tmp_path, info)
        path.unlink(missing_ok=True)
    assert keep_tokenizer(tmp_path, tokenizer) == info[TOKENIZER_DIGEST]
    assert load_tokenizer(path).vocab_size == tokenizer.vocab_size
