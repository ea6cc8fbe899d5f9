"""A run of a second whose phases can be hit by a real signal, in this process or in one of its own.

As a program: `python noticed_runs.py RUN_DIR MARKS FAULT`. It prints `AT FAULT` where the fault is, once: the file
MARKS/FAULT says that it was there. `stuck` faults block the main thread in C, as a compilation does. With the fault
`slow evaluation` each held-out row takes a third of a second; `no fault` has none.
"""

import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.metrics.progress import Phase, Progress
from jaxtrain.runtime.host import end_process

STEPS = 6
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(64, 8)).astype(np.float32)
Y = (X @ _RNG.normal(size=(8, 4))).argmax(-1).astype(np.int32)

# What is called where a run comes by; the name says where.
Passing = Callable[[str], None]


class PassedRows:
    """Rows whose reading is noticed, by the number of reads since the state was there."""

    def __init__(self, name: str, rows: range, passing: Passing, reads: Counter[str]) -> None:
        self._name, self._rows, self._passing, self._reads = name, rows, passing, reads

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._reads[self._name] += 1
        self._passing(f"{self._name} row {self._reads[self._name]}")
        return {"inputs": X[self._rows[index]], "targets": int(Y[self._rows[index]])}


class PassedPhases(Progress):
    """Progress whose phases are noticed as they begin; what is read up to the state being there does not count."""

    def __init__(self, passing: Passing, reads: Counter[str]) -> None:
        super().__init__()
        self._passing, self._reads = passing, reads
        reads["training"] = reads["held-out"] = -(10**6)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        with super().phase(name) as handle:
            self._passing(name)
            yield handle
        if name in ("creating state", "restoring checkpoint"):
            self._reads.clear()


def model(passing: Passing = lambda name: None) -> jt.Model:
    """One layer; its tracing is noticed."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"kernel": jax.random.normal(key, (8, 4)) * 0.3}

    def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        passing("model")
        return jnp.tanh(x @ params["kernel"])

    return jt.from_functions(init, apply, name="one layer")


def fit(run_dir: Path, passing: Passing, **changes: Any) -> jt.Result:
    """Train six steps of four rows, evaluate and save after every second one."""
    reads: Counter[str] = Counter()
    progress = PassedPhases(passing, reads)
    arguments: dict[str, Any] = dict(
        data=PassedRows("training", range(48), passing, reads),
        validation=PassedRows("held-out", range(48, 64), passing, reads),
        steps=STEPS,
        batch_size=4,
        mesh=jt.make_mesh(devices=jax.devices()[: jax.process_count()]),
        run_dir=run_dir,
        logging={"every": 1, "tensorboard": False, "report": True},
        evaluation={"every": 2},
        checkpoint={"every": 2, "keep_last": 9},
        overrides={"train.prefetch": 1, "train.workers": 1},
    )
    with mock.patch("jaxtrain.run.trainer.Progress", return_value=progress):
        return jt.fit(model(passing), jt.classification(), optax.adam(1e-2), **(arguments | changes))


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that an interrupted run must have in common with an undisturbed one."""
    with jt.Checkpointer(run_dir / "checkpoints", read_only=True) as checkpointer:
        saved = {step: checkpointer.verify(step) for step in checkpointer.steps()}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "checkpoint": saved[STEPS].digests,
        "eval_loss": saved[STEPS].eval_loss,
        "losses": [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row],
        "evaluations": [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row],
        "status": json.loads((run_dir / "run.json").read_text())["status"],
        "report": (run_dir / "report.html").exists(),
    }


def once(fault: str, marks: Path, act: Callable[[], None]) -> Passing:
    """Calls `act` at the first passing of `fault` that the folder of marks does not know."""

    def passing(name: str) -> None:
        if name == fault and not (mark := marks / name).exists():
            mark.touch()
            act()

    return passing


def block_in_c() -> None:
    """Wait for ever without Python: no handler runs in this thread again."""
    mutex = ctypes.create_string_buffer(64)  # of zeros: a mutex that is not locked
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def main() -> int:
    run_dir, marks, fault = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

    def act() -> None:
        os.write(2, f"AT {fault}\n".encode())
        if fault.startswith("stuck"):
            block_in_c()
        else:
            time.sleep(600)

    def slowly(name: str) -> None:
        if name.startswith("held-out row"):
            if name.endswith(" 1"):
                os.write(2, f"AT {fault}\n".encode())
            time.sleep(0.3)

    passing = slowly if fault == "slow evaluation" else once(fault.removeprefix("stuck "), marks, act)
    jt.start(emulate=1)
    callbacks = [jt.Callback(on_evaluation=lambda moment: passing(f"callback after step {moment.step}"))]
    try:
        fit(run_dir, passing, callbacks=callbacks)
    except jt.UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    end_process(main())  # as the command line does
