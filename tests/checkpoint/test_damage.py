"""Damage is noticed, an older step is used, and another model is refused before anything is read."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import abstract, assert_same, make_state

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.checkpoint.tree import flatten
from jaxtrain.errors import CheckpointError


@pytest.fixture
def lines():
    return []


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Steps 1 and 2 with different numbers, which no test writes to."""
    folder = tmp_path_factory.mktemp("kept") / "checkpoints"
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(seed=step), metadata={"step": step})
    return folder


@pytest.fixture
def saved(kept, tmp_path, lines):
    """A copy of them."""
    folder = shutil.copytree(kept, tmp_path / "checkpoints")
    with Checkpointer(folder, report=lines.append) as checkpointer:
        yield checkpointer


def flip_bits_in_array_data(checkpointer, step):
    """Change one value of one array and leave every checksum of the files in order, as a bad memory bar would."""
    import orbax.checkpoint as ocp

    path = checkpointer.directory / str(step)
    leaves = checkpointer.info(step).leaves
    stored = {name: leaf for name, leaf in flatten(make_state()).leaves.items() if leaf.size}
    wanted = {
        name: jax.random.key_data(leaf) if leaves[name][1].startswith("key") else leaf for name, leaf in stored.items()
    }
    arrays = Storage().read(path, {name: abstract(leaf) for name, leaf in wanted.items()})
    bits = jax.lax.bitcast_convert_type(arrays["params.mlp.kernel"], jnp.uint32)
    bits = bits.at[3, 5].set(bits[3, 5] ^ jnp.uint32(1 << 12))
    arrays["params.mlp.kernel"] = jax.lax.bitcast_convert_type(bits, jnp.float32)
    ocp.PyTreeCheckpointer().save(path / "state", arrays, force=True)


def truncate(checkpointer, step):
    """Of the largest file of arrays; how they are spread over files differs from save to save."""
    files = [path for path in (checkpointer.directory / str(step) / "state").rglob("d/*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:32])


def record(checkpointer, step):
    return checkpointer.directory / str(step) / "jaxtrain" / "metadata"


def delete_record(checkpointer, step):
    record(checkpointer, step).unlink()


@pytest.mark.parametrize(
    "damage", [flip_bits_in_array_data, truncate, delete_record], ids=lambda damage: damage.__name__
)
def test_a_damaged_newest_step_is_set_aside(saved, lines, capfd, damage):
    damage(saved, 2)
    assert_same(saved.restore(abstract(make_state())), make_state(seed=1))
    assert saved.steps() == [1]
    assert len(list(saved.directory.glob("2.corrupt-*"))) == 1
    (line,) = lines
    assert "checkpoints/2 is damaged" in line
    assert "step 1 is used instead" in line
    assert "\n" not in line
    assert capfd.readouterr().err == ""
    # The step is saved again when the run gets there.
    assert saved.save(2, make_state(seed=2), metadata={})
    assert_same(saved.restore(abstract(make_state())), make_state(seed=2))


def test_a_changed_bit_is_named_and_matters_where_it_is_read(saved):
    flip_bits_in_array_data(saved, 2)
    with pytest.raises(CheckpointError, match=r"2 is damaged: params/mlp/kernel of step 2 differs from what was saved"):
        saved.restore(abstract(make_state()), step=2)
    with pytest.raises(CheckpointError, match=r"params/mlp/kernel"):
        saved.verify()
    assert saved.verify(1).step == 1
    assert saved.steps() == [1, 2]
    moments = abstract(make_state().optimizer_state)
    assert_same(saved.restore(moments, prefix="optimizer_state"), make_state(seed=2).optimizer_state)


def test_never_a_fresh_start_when_all_are_damaged(saved):
    truncate(saved, 1)
    delete_record(saved, 2)
    for _ in range(2):  # the second start finds the same
        with pytest.raises(CheckpointError, match=r"^[^\n]*no intact checkpoint is left [^\n]* \(2 damaged\)[^\n]*$"):
            saved.restore(abstract(make_state()))
        assert saved.steps() == [1, 2]


def _replaced(**changes):
    return dataclasses.replace(abstract(make_state()), **changes)


def _shape(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# What is restored into, what the line calls it, and the first array that differs.
OTHER_MODELS = [
    (lambda: _replaced(step=_shape(())), "kind", r"1 of \d+ arrays differ, first step is saved as \(\) int32"),
    (lambda: abstract(make_state(width=64)), "model", r"first params/mlp/bias is saved as \(32,\) bfloat16, \("),
    (lambda: _replaced(ema={"kernel": _shape((2,))}), "moving average", r"first ema/kernel is not saved"),
    (lambda: abstract(make_state(optimizer="adafactor")), "optimizer", r"arrays differ, first optimizer_state"),
    (lambda: _replaced(key=jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))), "kind", r"key<fry>.*rbg"),
]


def test_another_model_is_refused_before_reading(saved, monkeypatch):
    monkeypatch.setattr(Storage, "read", lambda *arguments: pytest.fail("arrays were read"))
    for target, kind, phrase in OTHER_MODELS:
        line = rf"^[^\n]*checkpoints/2 is of another {kind}: [^\n]*{phrase}[^\n]*$"
        for refuse in (saved.restore, saved.check_like):
            with pytest.raises(CheckpointError, match=line):
                refuse(target())
    with pytest.raises(CheckpointError, match=r"first ema/kernel is not saved"):
        saved.restore({"kernel": _shape((2,))}, prefix="ema")
    assert saved.steps() == [1, 2]
    saved.check_like(abstract(make_state()))
    # One whose record is damaged is passed over, as by `restore`.
    record(saved, 2).write_text(record(saved, 2).read_text()[:100])
    saved.check_like(abstract(make_state()))


def flipped(position):
    def damage(path):
        content = bytearray(path.read_bytes())
        if content:
            content[position(len(content))] ^= 0x10
        path.write_bytes(content)

    return damage


BYTES = {
    "first byte": flipped(lambda size: 0),
    "middle byte": flipped(lambda size: size // 2),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


# Every file of a step; the plain row stands for the classes of positions.
@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name == "middle byte" else pytest.mark.long) for name in BYTES]
)
def test_no_byte_of_a_step_is_wrong_without_a_word(tmp_path, damage):
    def state(step):
        kernel = np.random.default_rng(step).standard_normal((16, 16), np.float32)
        return {"kernel": jnp.asarray(kernel), "step": jnp.int32(step)}

    two_steps = tmp_path / "saved"
    with Checkpointer(two_steps) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), metadata={})
    files = sorted(path.relative_to(two_steps / "2") for path in (two_steps / "2").rglob("*") if path.is_file())
    assert len(files) >= 10
    found = 0
    for number, name in enumerate(files):
        folder = shutil.copytree(two_steps, tmp_path / str(number))
        BYTES[damage](folder / "2" / name)
        lines: list[str] = []
        with Checkpointer(folder, report=lines.append) as checkpointer:
            restored = checkpointer.restore(state(0))
        step = int(restored["step"])
        assert np.array_equal(restored["kernel"], state(step)["kernel"]), name
        # Nothing reads the markers and shardings of Orbax, nor the bytes of a block that no index names.
        assert len(lines) == (step == 1), name
        assert all("\n" not in line and "2 is damaged" in line for line in lines), lines
        found += step == 1
    assert found >= 2, "the record and the arrays are read"
