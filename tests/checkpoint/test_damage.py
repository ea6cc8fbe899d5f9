"""Damage is noticed, an older step is used, and another model is refused before anything is read."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import abstract, assert_same, make_state

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.checkpoint.tree import flatten
from jaxtrain.errors import CheckpointError, ConfigError


@pytest.fixture
def lines():
    return []


@pytest.fixture
def saved(tmp_path, lines):
    """Steps 1 and 2 with different numbers."""
    checkpointer = Checkpointer(tmp_path / "checkpoints", report=lines.append)
    for step in (1, 2):
        checkpointer.save(step, make_state(seed=step), metadata={"step": step})
    checkpointer.wait()
    yield checkpointer
    checkpointer.close()


def data_file(checkpointer, step):
    """The largest file of arrays; how they are spread over files differs from save to save."""
    files = [path for path in (checkpointer.directory / str(step) / "state").rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


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


def flip_bytes_of_the_file(checkpointer, step):
    path = data_file(checkpointer, step)
    content = bytearray(path.read_bytes())
    for position in range(8, len(content), 16):
        content[position] ^= 0x10
    path.write_bytes(content)


def truncate(checkpointer, step):
    path = data_file(checkpointer, step)
    path.write_bytes(path.read_bytes()[:32])


def delete_data(checkpointer, step):
    data_file(checkpointer, step).unlink()


def alter_record(checkpointer, step):
    path = checkpointer.directory / str(step) / "jaxtrain" / "metadata"
    path.write_text(path.read_text().replace('"float32"', '"float16"', 1))


def cut_record(checkpointer, step):
    path = checkpointer.directory / str(step) / "jaxtrain" / "metadata"
    path.write_text(path.read_text()[:100])


def delete_record(checkpointer, step):
    (checkpointer.directory / str(step) / "jaxtrain" / "metadata").unlink()


DAMAGES = [
    flip_bits_in_array_data,
    flip_bytes_of_the_file,
    truncate,
    delete_data,
    alter_record,
    cut_record,
    delete_record,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
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


def test_a_changed_bit_is_named(saved):
    flip_bits_in_array_data(saved, 2)
    with pytest.raises(CheckpointError, match=r"2 is damaged: params/mlp/kernel of step 2 is not what was saved"):
        saved.restore(abstract(make_state()), step=2)
    with pytest.raises(CheckpointError, match=r"params/mlp/kernel"):
        saved.verify()
    assert saved.verify(1).step == 1
    assert saved.steps() == [1, 2]


def test_an_array_that_is_not_given_back_is_damage_too(saved, monkeypatch):
    read = Storage.read
    monkeypatch.setattr(Storage, "read", lambda self, path, wanted: dict(list(read(self, path, wanted).items())[1:]))
    with pytest.raises(CheckpointError, match="is not what was saved"):
        saved.restore(abstract(make_state()), step=2)


def test_damage_of_what_is_not_read_does_not_matter(saved):
    flip_bits_in_array_data(saved, 2)
    moments = abstract(make_state().optimizer_state)
    assert_same(saved.restore(moments, prefix="optimizer_state"), make_state(seed=2).optimizer_state)


@pytest.mark.parametrize(
    "damage", [flip_bits_in_array_data, truncate, delete_record], ids=lambda damage: damage.__name__
)
def test_never_a_fresh_start_when_all_are_damaged(saved, damage):
    for step in (1, 2):
        damage(saved, step)
    for _ in range(2):  # the second start finds the same
        with pytest.raises(CheckpointError, match=r"no intact checkpoint is left .* \(2 damaged\)") as caught:
            saved.restore(abstract(make_state()))
        assert "\n" not in str(caught.value)
        assert saved.steps() == [1, 2]


def test_a_reader_renames_nothing(saved, lines):
    truncate(saved, 2)
    with Checkpointer(saved.directory, read_only=True, report=lines.append) as reader:
        assert_same(reader.restore(abstract(make_state())), make_state(seed=1))
        with pytest.raises(CheckpointError, match="reading only"):
            reader.save(3, make_state(), metadata={})
    assert saved.steps() == [1, 2]
    assert "renamed" not in lines[0]


def _replaced(**changes):
    return dataclasses.replace(abstract(make_state()), **changes)


def _shape(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


OTHER_MODELS = {
    "dtype": (
        lambda: _replaced(step=_shape(())),
        r"1 of \d+ arrays differ, first step is \(\) int32 there, \(\) float32 here",
    ),
    "shape": (
        lambda: abstract(make_state(width=64)),
        r"differ, first params/mlp/bias is \(32,\) bfloat16 there, \(64,\) bfloat16 here; params/mlp/kernel is",
    ),
    "missing": (lambda: _replaced(ema={"kernel": _shape((2,))}), r"first ema/kernel is not there"),
    "average of statistics": (
        lambda: _replaced(ema_model_state={"mean": _shape((2,))}),
        r"1 of \d+ arrays differ, first ema_model_state/mean is not there",
    ),
    "extra": (
        lambda: _replaced(params={}),
        r"4 of \d+ arrays differ, first params/blocks/0 is \(8, 16\) float32 there and not here",
    ),
    "optimizer": (lambda: abstract(make_state(optimizer="sgd")), r"\d+ of \d+ arrays differ, first optimizer_state"),
    "key": (
        lambda: _replaced(key=jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))),
        r"key is \(\) key<fry> there, \(\) key<rbg> here",
    ),
}


@pytest.mark.parametrize(("target", "phrase"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_another_model_is_refused_before_reading(saved, monkeypatch, target, phrase):
    def read(*arguments):
        raise AssertionError("arrays were read")

    monkeypatch.setattr(Storage, "read", read)
    with pytest.raises(
        CheckpointError, match=f"checkpoints/2 is of another (model|optimizer|moving average|kind): .*{phrase}"
    ) as caught:
        saved.restore(target())
    assert "\n" not in str(caught.value)
    assert saved.steps() == [1, 2]
    assert ("another optimizer" in str(caught.value)) == ("first optimizer_state" in phrase)
    assert ("another model" in str(caught.value)) == ("params" in phrase)
    # Without a read, for who has to compile first.
    with pytest.raises(CheckpointError, match=phrase):
        saved.check_like(target())


def test_what_is_like_the_newest_intact_record_passes_unread(saved, monkeypatch):
    monkeypatch.setattr(Storage, "read", lambda *arguments: pytest.fail("arrays were read"))
    saved.check_like(abstract(make_state()))
    # One whose record is damaged is passed over, as by `restore`.
    cut_record(saved, 2)
    saved.check_like(abstract(make_state()))


def test_a_prefix_that_is_not_there(saved):
    with pytest.raises(CheckpointError, match=r"first ema/kernel is not there"):
        saved.restore({"kernel": _shape((2,))}, prefix="ema")


def test_a_newer_format_is_refused(saved):
    from jaxtrain.checkpoint.directory import seal

    path = saved.directory / "2" / "jaxtrain" / "metadata"
    content = json.loads(path.read_text())["content"]
    path.write_text(json.dumps(seal({**content, "format_version": 99})))
    with pytest.raises(CheckpointError, match="has format 99, written by jaxtrain"):
        saved.restore(abstract(make_state()))
    assert saved.steps() == [1, 2]


def test_foreign_entries_are_ignored(saved):
    root = saved.directory
    (root / "77").mkdir()
    (root / "88").symlink_to(root / "1")
    (root / "99").write_text("a file")
    (root / "notes.txt").write_text("a file")
    (root / "007").mkdir()
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert_same(checkpointer.restore(abstract(make_state())), make_state(seed=2))
        assert checkpointer.save(3, make_state(seed=3), metadata={})
    assert {"77", "88", "99", "notes.txt", "007", "2", "3"} <= {path.name for path in root.iterdir()}


def test_a_foreign_entry_in_the_way_is_renamed(saved, lines):
    (saved.directory / "3").mkdir()
    assert saved.save(3, make_state(), metadata={})
    saved.wait()
    assert saved.steps() == [2, 3]
    assert len(list(saved.directory.glob("3.foreign-*"))) == 1
    assert "not a checkpoint of jaxtrain" in lines[0]


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "empty"])
def test_nothing_to_restore(tmp_path, missing):
    root = tmp_path / "none" if missing else tmp_path
    with Checkpointer(root) as checkpointer:
        assert checkpointer.latest_step() is None
        for ask in (checkpointer.metadata, lambda: checkpointer.restore({}), checkpointer.verify):
            with pytest.raises(CheckpointError, match="no checkpoint in"):
                ask()
        with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
            checkpointer.info(5)
    assert root.exists() is not missing


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Checkpointer(tmp_path / "checkpoints")


def test_the_log_of_other_libraries_stays(saved, caplog):
    logging.getLogger("absl").warning("from elsewhere")
    assert "from elsewhere" in caplog.text
