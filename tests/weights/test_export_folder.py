"""Export writes a folder that appears when it is whole, from one process or from several, a tensor at a time."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.formats.safetensors import SINGLE, open_folder, write_safetensors
from jaxtrain.weights import write

LLAMA = Path(__file__).parent / "published" / "llama"


@pytest.fixture(scope="module")
def pretrained():
    return jt.load_pretrained(LLAMA)


@pytest.mark.parametrize("axes", [("pipe", None, "fsdp"), (None, "fsdp", "tensor")], ids=["layers", "experts"])
def test_a_position_is_gathered_however_it_is_sharded(axes):
    mesh = jt.make_mesh(data=1, pipe=2, fsdp=2, tensor=2)
    array = np.arange(4 * 2 * 8, dtype=np.float32).reshape(4, 2, 8)
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
    # What a host of GPUs and what several processes do, beside what stands in the host's memory.
    collective = write._gather(NamedSharding(mesh, PartitionSpec()))
    for position in ((), (3,), (2, 1)):
        np.testing.assert_array_equal(write.on_main_host(sharded, position), array[position])
        np.testing.assert_array_equal(collective(sharded, *position).addressable_data(0), array[position])


def test_an_export_that_fails_may_be_tried_again(tmp_path, monkeypatch, pretrained):
    def write_half(file, shapes, tensors):
        file.write_bytes(b"half")
        raise error

    for error in (ConfigError("no room"), KeyboardInterrupt()):
        monkeypatch.setattr(write, "write_safetensors", write_half)
        with pytest.raises(type(error)):
            jt.save_pretrained(tmp_path / "out", pretrained.params, model=pretrained)
        assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    # What a killed export left is no model and in nobody's way.
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / SINGLE).write_bytes(b"half")
    jt.save_pretrained(tmp_path / "out", pretrained.params, model=pretrained)
    before, after = open_folder(LLAMA), open_folder(tmp_path / "out")
    assert after.tensors == before.tensors
    for name in before.tensors:
        assert after.read(name).tobytes() == before.read(name).tobytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def two_processes(*words):
    """Runs a command in two processes with two devices each: their exit codes and what they say of errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxtrain", *words, "--emulate", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**variables, "JAX_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, error) for process, (_, error) in zip(started, outputs, strict=True)]


@pytest.mark.long
def test_two_processes_export(tmp_path):
    """Their devices hold a quarter of each array; the first writes, and what keeps it from that ends both."""
    source, run, out = open_folder(LLAMA), str(tmp_path / "run"), tmp_path / "out"
    arrays = {name: source.read(name) for name in source.tensors}
    arrays["model.norm.weight"] = np.full_like(arrays["model.norm.weight"], 1e6)
    (tmp_path / "in").mkdir()
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(tmp_path / "in" / SINGLE, shapes, arrays.items())
    (tmp_path / "in" / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    assert [code for code, _ in two_processes("import", str(tmp_path / "in"), "-o", run, "parallel.fsdp=4")] == [0, 0]
    first, second = two_processes("export", run, "-o", str(out), "--dtype", "float16")
    assert (first[0], second[0]) == (2, 2), (first, second)
    assert "beyond 65504" in first[1]
    assert "process 0 could not write the folder" in second[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "run"]
    ended = two_processes("export", run, "-o", str(out), "--max-shard-size", "20KB")
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(list(out.glob("model-*.safetensors"))) > 1
    written = open_folder(out)
    for name, array in arrays.items():
        assert written.read(name).tobytes() == array.tobytes(), name
