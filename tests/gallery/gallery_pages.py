"""Pages of docs/gallery/ for tests: their code, and their last call of `fit` with few steps on any mesh."""

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jaxtrain as jt
from jaxtrain.metrics.progress import Progress

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_gallery.py"
NUM_STEPS = 4
ONE: Mapping[str, int] = {"data": 1}
MESH: Mapping[str, int] = {"data": 2, "fsdp": 4}
# Each step is logged; what costs time and has no say in the numbers is left out.
_LOGGING = {"every": 1, "tensorboard": False, "report": False}


def load_script() -> Any:
    """The script that reads and runs pages, as a module."""
    spec = importlib.util.spec_from_file_location("make_gallery", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Call:
    """A call of `fit` on a page.

    Attributes:
        parts: model, task and optimizer.
        settings: the keywords, without the number of steps and the run directory.
        fit: the function that was called.
    """

    parts: tuple[Any, ...]
    settings: Mapping[str, Any]
    fit: Any

    def train(self, run_dir: Path, mesh: Mapping[str, int], *, steps: int = NUM_STEPS) -> jt.Result:
        """Make the call with few steps on a mesh."""
        devices = jax.devices()[: math.prod(mesh.values())]
        settings = {
            **self.settings,
            "steps": steps,
            "mesh": jt.make_mesh(**mesh, devices=devices),
            "logging": _LOGGING,
            "run_dir": run_dir,
            "progress": Progress(process_index=1),  # prints nothing
        }
        return self.fit(*self.parts, **settings)


def last_call(page: Any, folder: Path, monkeypatch: Any) -> tuple[Call, list[float]]:
    """Run model and training of a page with few steps on one device.

    Args:
        page: a `Page` of the script.
        folder: where its runs are written.
        monkeypatch: pytest's.

    Returns:
        The last call of `fit`, and its losses, step by step.
    """
    calls: list[Call] = []
    fit = jt.fit

    def record(*parts: Any, run_dir: str, **settings: Any) -> jt.Result:
        kept = {name: value for name, value in settings.items() if name not in ("steps", "epochs")}
        calls.append(Call(parts, kept, fit))
        return calls[-1].train(folder / run_dir, ONE)

    monkeypatch.setattr(jt, "fit", record)
    exec(compile(f"{page.model}\n{page.training}", f"{page.name}.md", "exec"), {})
    monkeypatch.undo()
    return calls[-1], losses(folder / "runs" / page.name)


def losses(run_dir: Path) -> list[float]:
    """The training loss of each step of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]
