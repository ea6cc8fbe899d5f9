"""Breaks one line of the core after the other and says which tests notice: how tight the net is where numbers are made.

    python scripts/mutations.py                 # each with the test folders that are nearest to it
    python scripts/mutations.py --only 3,17     # some of them
    python scripts/mutations.py --all           # the long tests too

Works on a copy of the tree, which it makes in a temporary folder. A mutation that no test notices is printed last, and
the exit code is then 1.
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
# (file below jaxtrain/, what stands there once, what is put in its place, tests that are tried)
MUTATIONS = [
    # ops
    ("ops/loss/cross_entropy.py", "LossSums(total + z, *", "LossSums(total - z, *", "ops parallel"),
    (
        "ops/loss/cross_entropy.py",
        "weights_BL = jax.lax.stop_gradient(jnp.where(unknown_BL & (weights_BL != 0), jnp.nan, weights_BL))",
        "weights_BL = jnp.where(unknown_BL & (weights_BL != 0), jnp.nan, weights_BL)",
        "ops train",
    ),
    ("ops/loss/blockwise.py", "sum_N * jnp.exp(top_N - higher_N)", "sum_N", "ops"),
    ("ops/attention/reference.py", "mask & (distance < window)", "mask & (distance <= window)", "ops models"),
    ("ops/attention/ring.py", "jnp.exp(other[0] - maximum)", "jnp.exp(one[0] - maximum)", "parallel"),
    ("ops/attention/blockwise.py", "(1 - jnp.square(plain / form.softcap))", "1.0", "ops"),
    ("ops/low_precision.py", "c = quantize(gradient, GRADIENT)", "c = quantize(gradient, FORWARD)", "ops train"),
    ("ops/elementwise.py", "(1 + 3 * _CUBIC * square)", "(1 + 2 * _CUBIC * square)", "ops models"),
    ("ops/images.py", "(dmean - factor * dbias) / count", "(dmean + factor * dbias) / count", "ops models"),
    ("ops/experts/compute.py", "jax.lax.stop_gradient(load_E)", "load_E", "ops models parallel"),
    ("ops/experts/grouped.py", "sum_IO + summed(x_SI, g_SO)", "summed(x_SI, g_SO)", "ops"),
    (
        "ops/elementwise.py",
        "row_numbers(x.shape[0]))",
        "jnp.zeros_like(row_numbers(x.shape[0])))",
        "models parallel train",
    ),
    # layout and parallel
    ("layout/rules.py", '"batch": ("data", "fsdp", "expert")', '"batch": ("data", "fsdp")', "layout parallel"),
    ("layout/zero.py", "return 0 if zero == 3 else zero", "return min(zero, 1)", "layout parallel"),
    ("layout/gather.py", "if sum_first else (stored,)", "if sum_first else (gathered,)", "layout parallel plan"),
    ("parallel/reduction.py", 'return jax.lax.psum(gradient, "data")', "return gradient", "parallel train"),
    ("parallel/gradients.py", "lambda t: t / divisor(weight)", "lambda t: t / accumulation_steps", "train parallel"),
    (
        "parallel/gradients.py",
        "sums, others, params, fixed, state, rows, jax.random.fold_in(key, index)",
        "sums, others, params, fixed, state, rows, jax.random.fold_in(key, 0)",
        "train parallel",
    ),
    ("parallel/schedules.py", "backward_tick=i + 2 * (p - 1) - s", "backward_tick=i + 2 * p - 1 - s", "parallel"),
    ("parallel/global_rows.py", "jnp.moveaxis(stacked, 0, 1).reshape(", "stacked.reshape(", "train parallel"),
    # train and precision
    (
        "train/update.py",
        "settings.clip_norm / jnp.maximum(grad_norm, settings.clip_norm)",
        "settings.clip_norm / jnp.maximum(grad_norm, 1.0)",
        "train parallel",
    ),
    (
        "train/update.py",
        "moved = keep(moved, optimizer_state, accepted)",
        "moved = keep(moved, optimizer_state, jnp.bool_(True))",
        "train",
    ),
    ("train/update.py", "jnp.minimum(decay, (1 + t) / (10 + t))", "jnp.minimum(decay, (1 + t) / (11 + t))", "train"),
    ("train/update.py", "weighs = has_weight | ", "weighs = jnp.bool_(True) | has_weight | ", "train"),
    ("train/spikes.py", "/ (count - 1)", "/ count", "train"),
    (
        "precision/policy.py",
        "finite_steps >= scaling.growth_interval",
        "finite_steps > scaling.growth_interval",
        "precision train",
    ),
    (
        "precision/nf4.py",
        "counted = jnp.arange(num_outputs) * blocks + jnp.arange(blocks)[:, None]",
        "counted = jnp.arange(num_outputs) + jnp.arange(blocks)[:, None] * num_outputs",
        "precision finetune",
    ),
    # optim
    (
        "optim/schedules.py",
        "optax.linear_schedule(peak / (warmup + 1), peak, warmup)",
        "optax.linear_schedule(0.0, peak, warmup)",
        "optim",
    ),
    ("optim/schedules.py", "[max(steps - decay, warmup)]", "[max(steps - decay + 1, warmup)]", "optim"),
    ("optim/muon.py", "math.sqrt(max(rows, columns))", "math.sqrt(min(rows, columns))", "optim parallel"),
    ("optim/moments.py", "1 - (state.count + 1).astype", "1 - (state.count + 2).astype", "optim parallel"),
    ("optim/lookahead.py", "count = (state.count + 1) % sync_period", "count = state.count % sync_period", "optim"),
    (
        "optim/moments.py",
        "random = random_bits(leaf.shape, count, number)",
        "random = random_bits(leaf.shape, jnp.int32(0), number)",
        "optim",
    ),
    ("optim/masks.py", "dims >= 2 and", "dims >= 1 and", "optim train"),
    # models
    (
        "models/layers.py",
        "[first * cos - second * sin, second * cos + first * sin]",
        "[first * cos + second * sin, second * cos - first * sin]",
        "models interop",
    ),
    ("models/shipped/moe.py", "jnp.where(real_BL, loss_BL, 0.0)", "loss_BL", "models"),
    ("models/tasks.py", "losses = (1 - label_smoothing) * losses +", "losses = losses +", "models train"),
    (
        "models/preferences.py",
        "losses_B - label_smoothing * jax.nn.log_sigmoid(-margin_B)",
        "losses_B + label_smoothing * jax.nn.log_sigmoid(-margin_B)",
        "preferences",
    ),
    (
        "models/task.py",
        "jnp.where(targets < 0, 0.0, weights)",
        "jnp.where(targets <= 0, 0.0, weights)",
        "models train ops",
    ),
    ("models/adapters.py", "+ kernel.scale * product", "+ product", "finetune interop models"),
    # checkpoint and data
    ("checkpoint/storage.py", "values.get(name, ()) != info.digests.get(name)", "name not in values", "checkpoint"),
    ("checkpoint/upkeep.py", "set(steps[-self.keep_last :])", "set(steps[-self.keep_last - 1 :])", "checkpoint"),
    ("data/batches.py", "self._read(numbers + positions // num_rows * num_rows)", "self._read(numbers)", "data"),
    ("data/batches.py", "np.where(by_row, own, 0)", "own", "data train run"),
    ("data/permutation.py", "keys = keys + _INCREMENT\n        low", "low", "data"),
]


def noticed(place: Path, number: int, *, everything: bool) -> bool:
    """Break one line of the copy, run its tests, mend the line, and return whether a test failed."""
    name, old, new, folders = MUTATIONS[number]
    file = place / "jaxtrain" / name
    text = file.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{name} holds {old!r} {text.count(old)} times, not once: write this mutation anew")
    file.write_text(text.replace(old, new), encoding="utf-8")
    # One process: with workers the first failure waits for what the others have begun.
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    words += ["--all"] if everything else []
    words += [f"tests/{folder}" for folder in folders.split()]
    # What the mutation does not change is compiled once for all of them.
    kept = {"JAXTRAIN_CACHE_DIR": str(place.parent / "compiled")}
    environment = {**os.environ, "PYTHONPATH": str(place), "JAX_PLATFORMS": "cpu", **kept}
    began = time.monotonic()
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
    file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1, 2):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    says = failed[0][:110] if failed else "NOT NOTICED"
    print(f"{number:2} {time.monotonic() - began:4.0f} s  {name}: {new[:40]!r}: {says}", flush=True)
    return bool(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of mutations, with commas")
    parser.add_argument("--all", action="store_true", help="run the long tests of these folders too")
    given = parser.parse_args()
    numbers = range(len(MUTATIONS)) if given.only is None else [int(one) for one in given.only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "jaxtrain"
        left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "build")
        shutil.copytree(ROOT, place, ignore=left_out, symlinks=True)
        left = [number for number in numbers if not noticed(place, number, everything=given.all)]
    print(f"{len(numbers) - len(left)} of {len(numbers)} noticed" + (f"; not: {left}" if left else ""))
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
