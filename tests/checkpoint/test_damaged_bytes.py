"""Every file of a step, damaged at every class of position: what is restored is what was saved, of this step or of the
one before it.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpointer

TARGET = {"kernel": jnp.zeros((16, 16)), "step": jnp.int32(0)}


def state(step: int) -> dict[str, Any]:
    kernel = np.random.default_rng(step).standard_normal((16, 16), np.float32)
    return {"kernel": jnp.asarray(kernel), "step": jnp.int32(step)}


def flipped(position: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        if content:
            content[position(len(content))] ^= 0x10
        path.write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": flipped(lambda size: 0),
    "second quarter": flipped(lambda size: size // 4),
    "middle byte": flipped(lambda size: size // 2),
    "last byte": flipped(lambda size: size - 1),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), metadata={})
    return folder


# The classes of files by what they hold; the long rows damage every one of the step's files.
@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name == "middle byte" else pytest.mark.long) for name in DAMAGES]
)
def test_no_byte_of_a_step_is_wrong_without_a_word(
    tmp_path: Path, saved: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Reads that fail print as they end; here they fail by the dozen and are waited for once.
    monkeypatch.setattr("jaxtrain.checkpoint.failures._PENDING_READS_SECONDS", 0.02)
    files = sorted(path.relative_to(saved / "2") for path in (saved / "2").rglob("*") if path.is_file())
    assert len(files) >= 10
    found = 0
    for number, name in enumerate(files):
        folder = shutil.copytree(saved, tmp_path / str(number))
        DAMAGES[damage](folder / "2" / name)
        lines: list[str] = []
        with Checkpointer(folder, report=lines.append) as checkpointer:
            restored = checkpointer.restore(TARGET)
        step = int(restored["step"])
        assert np.array_equal(restored["kernel"], state(step)["kernel"]), name
        # Nothing reads the markers and shardings of Orbax, nor the bytes of a block that no index names.
        assert len(lines) == (step == 1), name
        assert all("\n" not in line and "2 is damaged" in line for line in lines), lines
        found += step == 1
        shutil.rmtree(folder)
    assert found >= 2, "the record and the arrays are read"


@pytest.mark.long
def test_what_is_not_of_a_step_is_no_part_of_it(tmp_path: Path, saved: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    for name in ("2/extra", "2/state/d/extra", "2/jaxtrain/extra", "2/state/ocdbt.process_9/manifest.ocdbt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"extra")
    with Checkpointer(folder) as checkpointer:
        assert int(checkpointer.restore(TARGET)["step"]) == 2
        assert checkpointer.verify(2).step == 2
