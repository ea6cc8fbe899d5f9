"""The tokenizer of a run is intact, or its second copy is used, or one line says how to have it back."""

import shutil
from pathlib import Path

import pytest

from jaxtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from jaxtrain.errors import DataError
from jaxtrain.run.kept_tokenizer import COPY_FILE, DIGEST_KEY, TOKENIZER_FILE, keep_tokenizer, read_tokenizer

DAMAGED = {"cut": b'{"jaxtrain_', "another": b'{"jaxtrain_tokenizer": "byte", "special": ["<x>"]}', "gone": None}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_tokenizer_that_is_damaged_or_gone(tmp_path: Path, content: bytes | None) -> None:
    def damage(name: str) -> None:
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_bytes(content)

    tokenizer, lines = ByteTokenizer(["<a>"]), []
    digest, line = keep_tokenizer(tmp_path, tokenizer)
    assert line is None
    assert keep_tokenizer(tmp_path, tokenizer) == (digest, None)
    info = {DIGEST_KEY: digest}
    damage(TOKENIZER_FILE)
    found = read_tokenizer(tmp_path, info, lines.append)
    assert isinstance(found, ByteTokenizer)
    assert found.special == ("<a>",)
    assert "tokenizer.copy.json is used" in lines[0]
    damage(COPY_FILE)
    with pytest.raises(DataError, match=r"tokenizer\.json is .*; run 'jaxtrain train .*' again, which writes it"):
        read_tokenizer(tmp_path, info, lines.append)
    # What both kinds of damage leave is written again; that both files are gone is what a run finds that begins.
    _, line = keep_tokenizer(tmp_path, tokenizer)
    assert (line is None) == (content is None)
    assert load_tokenizer(tmp_path / TOKENIZER_FILE).vocab_size == tokenizer.vocab_size
    (tmp_path / COPY_FILE).unlink()
    (tmp_path / TOKENIZER_FILE).unlink()
    (tmp_path / TOKENIZER_FILE).mkdir()
    _, line = keep_tokenizer(tmp_path, tokenizer)
    assert line is not None
    assert list(tmp_path.glob("tokenizer.json.foreign-*"))


def test_a_run_of_an_earlier_version_has_no_digest(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, {}, print) is None
    ByteTokenizer().save(tmp_path / TOKENIZER_FILE)
    found = read_tokenizer(tmp_path, {}, print)
    assert found is not None
    shutil.rmtree(tmp_path)
