"""Breaks one line of the core after the other and says which tests notice: how tight the net is where numbers are made.

    python scripts/mutations.py                       # each with the test folders that are nearest to it
    python scripts/mutations.py --only ring-merge     # some of them, with commas
    python scripts/mutations.py --all                 # the long tests too

Works on a copy of the tree, which it makes in a temporary folder. What no test notices is printed last, and the exit
code is then 1. A text that its room does not hold exactly once is an error that names it, before anything runs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Name: (folder below jaxtrain/, what one of its files holds once, what is put in its place, folders of tests).
MUTATIONS = {
    "z-loss-sign": ("ops", "LossSums(total + z, *", "LossSums(total - z, *", "ops parallel"),
    "blockwise-rescale": ("ops", "sum_N * jnp.exp(top_N - higher_N)", "sum_N", "ops"),
    "window-by-one": ("ops", "mask & (distance < window)", "mask & (distance <= window)", "ops models"),
    "ring-merge": ("ops", "jnp.exp(other[0] - maximum)", "jnp.exp(one[0] - maximum)", "parallel"),
    "softcap-gradient": ("ops", "(1 - jnp.square(plain / form.softcap))", "1.0", "ops"),
    "gelu-gradient": ("ops", "(1 + 3 * _CUBIC * square)", "(1 + 2 * _CUBIC * square)", "ops models"),
    "batch-norm-gradient": (
        "ops",
        "(dmean - factor * dbias) / count",
        "(dmean + factor * dbias) / count",
        "ops models",
    ),
    "dropout-rows": ("ops", "row_numbers(x.shape[0]))", "jnp.zeros_like(row_numbers(x.shape[0])))", "models train"),
    "batch-axes": ("layout", '"batch": ("data", "fsdp", "expert")', '"batch": ("data", "fsdp")', "layout parallel"),
    "gather-gradient": ("layout", "if sum_first else (stored,)", "if sum_first else (gathered,)", "layout parallel"),
    "mean-over-rows": (
        "parallel",
        "lambda t: t / divisor(weight)",
        "lambda t: t / accumulation_steps",
        "train parallel",
    ),
    "1f1b-tick": ("parallel", "backward_tick=i + 2 * (p - 1) - s", "backward_tick=i + 2 * p - 1 - s", "parallel"),
    "global-rows": ("parallel", "jnp.moveaxis(stacked, 0, 1).reshape(", "stacked.reshape(", "train parallel"),
    "ema-warmup": (
        "train",
        "jnp.minimum(decay, (1 + t) / (10 + t))",
        "jnp.minimum(decay, (1 + t) / (11 + t))",
        "train",
    ),
    "spike-variance": ("train", "/ (count - 1)", "/ count", "train"),
    "loss-scale-growth": (
        "precision",
        "finite_steps >= scaling.growth_",
        "finite_steps > scaling.growth_",
        "precision",
    ),
    "warmup-first-step": ("optim", "optax.linear_schedule(peak / (warmup + 1),", "optax.linear_schedule(0.0,", "optim"),
    "wsd-decay": ("optim", "[max(steps - decay, warmup)]", "[max(steps - decay + 1, warmup)]", "optim"),
    "muon-scale": ("optim", "math.sqrt(max(rows, columns))", "math.sqrt(min(rows, columns))", "optim parallel"),
    "rounding-bits": ("optim", "random_bits(leaf.shape, count,", "random_bits(leaf.shape, jnp.int32(0),", "optim"),
    "rotary": (
        "models",
        "[first * cos - second * sin, second",
        "[first * cos + second * sin, second",
        "models interop",
    ),
    "label-smoothing": ("models", "losses = (1 - label_smoothing) * losses +", "losses = losses +", "models train"),
    "ignored-targets": ("models", "jnp.where(targets < 0, 0.0, w", "jnp.where(targets <= 0, 0.0, w", "models train"),
    "adapter-scale": ("models", "+ kernel.scale * product", "+ product", "finetune interop models"),
    "digest": ("checkpoint", "values.get(name, ()) != info.digests.get(name)", "name not in values", "checkpoint"),
    "keep-last": ("checkpoint", "set(steps[-self.keep_last :])", "set(steps[-self.keep_last - 1 :])", "checkpoint"),
}


def file_of(name: str, root: Path) -> Path:
    """The file that a mutation changes."""
    room, old = MUTATIONS[name][:2]
    found = [path for path in (root / "jaxtrain" / room).rglob("*.py") for _ in range(path.read_text().count(old))]
    if len(found) != 1:
        sys.exit(f"mutation {name}: jaxtrain/{room}/ holds {old!r} {len(found)} times, not once: write it anew")
    return found[0]


def noticed(place: Path, name: str, *, everything: bool) -> bool:
    """Break one line of the copy, run its tests, mend the line, and return whether a test failed."""
    _, old, new, folders = MUTATIONS[name]
    file = file_of(name, place)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(old, new), encoding="utf-8")
    # One process: with workers the first failure waits for what the others have begun.
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    words += [*(["--all"] if everything else []), *(f"tests/{folder}" for folder in folders.split())]
    # What the mutation does not change is compiled once for all of them.
    kept = {"JAXTRAIN_CACHE_DIR": str(place.parent / "compiled")}
    environment = {**os.environ, "PYTHONPATH": str(place), "JAX_PLATFORMS": "cpu", **kept}
    began = time.monotonic()
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
    file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1, 2):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"{time.monotonic() - began:4.0f} s  {name}: {failed[0][:110] if failed else 'NOT NOTICED'}", flush=True)
    return bool(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of mutations, with commas")
    parser.add_argument("--all", action="store_true", help="run the long tests of these folders too")
    given = parser.parse_args()
    names = list(MUTATIONS) if given.only is None else given.only.split(",")
    for name in MUTATIONS:
        file_of(name, ROOT)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "jaxtrain"
        left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "build")
        shutil.copytree(ROOT, place, ignore=left_out, symlinks=True)
        left = [name for name in names if not noticed(place, name, everything=given.all)]
    print(f"{len(names) - len(left)} of {len(names)} noticed" + (f"; not: {', '.join(left)}" if left else ""))
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
