"""GGUF files: what is in them, any slice of any tensor, and one line for each way in which a file can be wrong."""

import numpy as np
import pytest
from gguf_files import gguf_bytes, q8_0, string, value

from jaxtrain.errors import CheckpointError
from jaxtrain.published.gguf import read_gguf, read_tensor

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
TWO = {"a": MATRIX, "b": np.float16(MATRIX)}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read(tmp_path, version):
    metadata = {"name": "it", "yes": True, "many": ["x", "é"], "numbers": [3, 4]}
    numbers = {"eps": ("f32", 1e-5), "big": ("u64", 2**40)}
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(metadata | numbers, TWO, version=version))
    file = read_gguf(path)
    assert file.metadata == metadata | {"eps": 1e-5, "big": 2**40}
    assert {name: (one.shape, one.kind.name) for name, one in file.tensors.items()} == {
        "a": ((3, 4), "F32"),
        "b": ((3, 4), "F16"),
    }
    for name, array in TWO.items():
        found = read_tensor(file, name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_another_alignment_is_kept(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({"general.alignment": 256}, TWO, alignment=256))
    file = read_gguf(path)
    assert file.tensors["a"].start % 256 == 0
    np.testing.assert_array_equal(read_tensor(file, "b"), TWO["b"])


INDICES = {
    "all": (slice(None),) * 3,
    "rows": (slice(1, 2), slice(2, 5), slice(None)),
    "columns within one block": (slice(None), slice(None), slice(33, 60)),
    "columns across blocks": (slice(0, 1), slice(None), slice(31, 65)),
    "nothing": (slice(0, 0), slice(None), slice(5, 5)),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_a_slice_is_the_slice_of_the_whole(tmp_path, index, stored):
    array = np.random.default_rng(0).normal(size=(2, 6, 96)).astype(np.float32)
    tensor, expected = q8_0(array) if stored == "Q8_0" else (array, array)
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({}, {"w": tensor}))
    file = read_gguf(path)
    np.testing.assert_array_equal(read_tensor(file, "w", index), expected[index])
    rows = np.array([1, 0, 1])
    np.testing.assert_array_equal(read_tensor(file, "w", index, rows), expected[rows][:, *index[1:]])


def entry(name="a", shape=(3, 4), kind=0, offset=0):
    return gguf_bytes({}, TWO, entries=[(name, shape, kind, offset)])


def changed(given, old, new):
    return gguf_bytes({"k": given}, {}).replace(old, new)


WRONG = {
    "an empty file": (b"", "is not a GGUF file: it is empty"),
    "another format": (b"{}" * 20, "does not begin with the letters GGUF"),
    "version 1": (gguf_bytes({}, {}, version=1), "is version 1 of GGUF; versions 2 and 3, little-endian, are read"),
    "big-endian": (gguf_bytes({}, {}, version=0x03000000), "is a big-endian file of GGUF"),
    "only the letters": (b"GGUF", "a number of 4 bytes at byte 4 goes past the end, byte 4"),
    "too many tensors": (gguf_bytes({}, {}, counts=(2**40, 0)), "it states 1099511627776 tensors, more than 262144"),
    "too many keys": (gguf_bytes({}, {}, counts=(0, 2**40)), "keys of metadata, more than 65536"),
    "more keys than there are": (gguf_bytes({}, {}, counts=(0, 2)), "goes past the end"),
    "a long string": (changed("v", string("v"), b"\0\0\0\0\1\0\0\0v"), "bytes for a string of k, more"),
    "a string past the end": (changed("v", string("v"), b"\0\0\1\0\0\0\0\0v"), "a string of k of 65536 bytes"),
    "a key twice": (gguf_bytes([("k", 1), ("k", 2)], {}), "the key 'k' is there twice"),
    "a string that is not text": (changed("vv", b"vv", b"\xff\xfe"), "a string of k before byte"),
    "neither true nor false": (changed(True, value(True), value(True)[:4] + b"\7"), "k is neither true nor false"),
    "an unknown type": (changed(1, value(1), b"\x63\0\0\0\1\0\0\0"), "k has the type 99"),
    "a long array": (changed([5], value([5]), value([5])[:8] + b"\0\0\0\0\1\0\0\0"), "elements for k, more than"),
    "an alignment of 3": (gguf_bytes({"general.alignment": 3}, {}), "general.alignment is 3, not a power of two"),
    "a tensor twice": (gguf_bytes({}, TWO, entries=[("a", (3,), 0, 0)] * 2), "the tensor a is there twice"),
    "a name of two lines": (entry(name="a\nb"), "a tensor's name before byte"),
    "five dimensions": (entry(shape=(1,) * 5), "the tensor a has 5 dimensions, more than 4"),
    "no elements": (entry(shape=(0, 4)), "the tensor a has the shape [0, 4], which holds nothing"),
    "a type that is not read": (entry(kind=16), "the tensor a is stored as IQ2_XXS; the types read are F32, F16, Q4_0"),
    "a type that does not exist": (entry(kind=99), "the tensor a is stored as number 99"),
    "half a block": (entry(kind=8), "the rows of a, 4 elements, are not whole blocks of Q8_0"),
    "between alignments": (entry(offset=4), "the tensor a begins at 4, not a multiple of 32"),
    "past the end": (entry(offset=128), "the tensor a ends at byte"),
    "a huge shape": (entry(shape=(2**62, 2**62)), "the tensor a ends at byte"),
    "an overlap": (
        gguf_bytes({}, TWO, entries=[("a", (3, 4), 0, 0), ("b", (3, 4), 1, 32)]),
        "the tensors a and b overlap",
    ),
    "a truncated file": (gguf_bytes({}, TWO)[:-8], "the tensor b ends at byte"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    told = str(caught.value)
    assert str(path) in told
    assert message in told
    assert "\n" not in told


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf: No such file"):
        read_gguf(tmp_path / "none.gguf")
