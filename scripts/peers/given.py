"""Writes what every peer is given: initial values, batches in their order, the rate of each step.

python scripts/peers/given.py FOLDER STEPS CONFIG

The three come from jaxtrain's own config, data and seed, so that `ours.py` has them without reading a file.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config import load_config
from jaxtrain.data.configured import open_run_data
from jaxtrain.optim.optimizers import build_schedule
from jaxtrain.run.assemble import assemble
from jaxtrain.run.spec import RunSpec


def flat(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """Return the leaves of a nested dict by their paths."""
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    return {
        path: leaf for name, part in tree.items() for path, leaf in flat(part, f"{prefix}/{name}".strip("/")).items()
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays by their paths, as `np.load` reads them."""
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]  # no path is the name of its own argument


def main(folder: Path, steps: int, name: str) -> None:
    """Write values.npz and batches.npz (a leading dim of steps)."""
    spec = RunSpec(load_config(name), Path("runs/unused"))
    config = spec.config
    parts = assemble(spec, open_run_data(spec.config))
    write(folder / "values.npz", flat(parts.step.init(config.seed).params))
    load = parts.step.loader(parts.batches)
    batches = [flat(load(number)) for number in range(steps)]
    columns = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    assert config.optimizer.learning_rate is not None, "the config of the peers has a rate"
    schedule = build_schedule(config.optimizer.schedule, peak=config.optimizer.learning_rate, steps=config.train.steps)
    write(folder / "batches.npz", {"rates": np.array([schedule(k) for k in range(steps)], np.float32), **columns})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
