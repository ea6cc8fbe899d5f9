"""Every mistake a user can make with data is one line: what is wrong, where, what would work."""

import numpy as np
import pytest

from jaxtrain.config.data import (
    ImageFolderData,
    JsonlData,
    TableData,
    TextData,
    TokenData,
)
from jaxtrain.data import Batches, check_tokens, open_data, prepare_tokens
from jaxtrain.errors import DataError


def text(path, **settings):
    return TextData(path=str(path), **settings)


def jsonl(path):
    return JsonlData(path=str(path))


def table(path):
    return TableData(path=str(path))


def images(path):
    return ImageFolderData(path=str(path), image_size=8)


WHOLE = b"x,age\n" + b"".join(b"%d,%d\n" % (i, i % 40) for i in range(400))
# What is opened (below a folder), its content, by whom, and what is wrong.
FILES = {
    "empty file": ("a.txt", b"", text, "a.txt is empty"),
    "not UTF-8": ("a.txt", b"good \xff bad", text, "a.txt is not UTF-8 at byte 5 (0xff)"),
    "compressed JSON lines as text": ("a.jsonl.zst", b"x", text, "a.jsonl.zst holds JSON lines, not plain text"),
    "a text shorter than two rows": ("a.txt", b"0123456789" * 3, text, "a.txt has 31 tokens, too few for one training"),
    "corrupt JSONL": ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', jsonl, "a.jsonl:3 is not JSON (Expecting value"),
    "table of another format": ("a.xls", b"x", table, "a.xls has no known format"),
    "no number": ("a.csv", b"x,y,z\n1,2,3\n1,red,3\n", table, "a.csv:3 column 'y' is 'red', not a number"),
    "no target": ("a.csv", b"x,y,z\n1,1,3\n1,1,NaN\n", table, "a.csv:3 column 'z' is 'NaN', not a number"),
    "one name twice": ("a.csv", b"x,y,x\n1,1,3\n", table, "a.csv:1 names column 'x' twice"),
    "no header": ("a.csv", b"1,2,3\n4,5,6\n", table, "a.csv:1 holds 1, 2, 3; the first line must name"),
    "ages or classes": ("a.csv", WHOLE, table, "a.csv has 40 distinct integers as targets of 400 rows, which could be"),
}
# Files to write, what is opened, by whom, and what is wrong.
FOLDERS = {
    "missing file": ([], "no/such.txt", text, "no/such.txt does not exist; the nearest existing path is"),
    "folder without text": (["a.md"], "", text, "contains or matches no .txt file"),
    "glob without a match": (["sub/a.md"], "sub/*/*.txt", text, "sub/*/*.txt contains or matches no .txt file"),
    "no folder of shards": (["a.bin"], "", lambda path: TokenData(path=str(path)), "has no metadata.json"),
    "parts that are no classes": (
        ["Train/a/a.png", "Test/a/a.png"],
        "",
        images,
        "holds the folders Test, Train; give one per class",
    ),
    "another class to validate": (
        ["train/a/a.png", "train/b/a.png", "val/c/a.png"],
        "",
        images,
        "val/c is a class",
    ),
}


def check_line(config, said):
    with pytest.raises(DataError) as error:
        open_data(config, sequence_length=16, seed=0)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(("name", "content", "config", "said"), FILES.values(), ids=FILES)
def test_a_wrong_file_is_one_line(name, content, config, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    check_line(config(tmp_path / name), said)


@pytest.mark.parametrize(("files", "path", "config", "said"), FOLDERS.values(), ids=FOLDERS)
def test_a_wrong_path_is_one_line(files, path, config, said, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    check_line(config(tmp_path / path), said)


def test_an_image_that_cannot_be_decoded_is_named_when_read(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.png").write_bytes(b"no image")
    data = open_data(images(tmp_path), sequence_length=None, seed=0)
    pattern = r"^image .*/(cat|dog)/\d\.png cannot be decoded \(cannot identify image file.*\); repair or remove it$"
    for rows in (data.train, data.validation):
        with pytest.raises(DataError, match=pattern) as error:
            Batches(rows, 2, seed=0, shuffle=True)
        assert "\n" not in str(error.value)


def test_a_bad_npz_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, inputs=np.array([[0, 1], [2, np.nan]]), targets=np.zeros(2))
    with pytest.raises(DataError, match=r"a\.npz array 'inputs' is nan at \[1, 1\]; remove or fill the row$"):
        open_data(table(path), sequence_length=None, seed=0)


@pytest.mark.parametrize("ids", [[[0, 1], [2, 5]], [[0, 1], [2, -1]]], ids=["large", "negative"])
def test_check_tokens_names_the_source_and_the_position(ids):
    with pytest.raises(DataError, match=rf"^rows: token {ids[1][1]} at position 1, 1 is outside the vocabulary of 5;"):
        check_tokens(np.array(ids), 5, "rows")
    check_tokens(np.abs(np.array(ids)), 6, "rows")


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
    with pytest.raises(DataError, match=r"shard-00001.bin: token 300 at position 37 is outside the vocabulary of 256;"):
        open_shards(folder)


def test_one_changed_token_of_a_shard_is_other_data(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 30_000)
    prepare_tokens(text(tmp_path / "a.txt"), tmp_path / "shards")
    (shard,) = (tmp_path / "shards").glob("*.bin")
    before = open_shards(tmp_path / "shards").fingerprint
    assert open_shards(tmp_path / "shards").fingerprint == before
    tokens = np.fromfile(shard, "<u2")
    tokens[111_111] += 1
    tokens.tofile(shard)
    assert open_shards(tmp_path / "shards").fingerprint != before


def test_a_truncated_shard_names_both_sizes(tmp_path):
    folder = prepared(tmp_path)
    shard = folder / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard-00000.bin has 199 bytes, metadata.json says 200;"):
        open_shards(folder)
