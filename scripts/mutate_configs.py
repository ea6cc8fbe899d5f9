"""Trains, or is refused, with hundreds of configs, command lines and calls that make no sense; prints what was taken.

    python scripts/mutate_configs.py                 # about 600 cases, some minutes
    python scripts/mutate_configs.py --cases 120     # every n-th of them
    python scripts/mutate_configs.py --only optimizer.b1

Every key of the schema, in a small config that reads it, gets values of wrong types, extremes, NaN, unicode, lists and
mappings; then come random pairs of keys, files, command lines and calls of `fit`. A case is good if it ends within
--seconds with exit code 2 or 3 and one line of ours last, or if it trains one step to a finite loss. The cases run in
one process after another (a crash costs one case), each under an alarm and a limit of memory.

Exit code 1: some case was met badly; these are printed last.
"""

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from mutations import BASES, COMMANDS, FITS, LARGEST, NO_LOSS, VALUES, write_files  # noqa: E402  beside this file

# What the cases prove is decided before LLVM, whose optimizations take most of compiling small models.
FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
MEMORY = 12 << 30  # bytes of addresses of a process; jax alone takes about 3 GiB of them
PER_PROCESS = 60


class HangError(BaseException):
    """A case took too long; no exception that a program may catch."""


def main() -> int:
    """Runs the cases in processes and prints what they did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=None, help="about this many, evenly chosen; default: all")
    parser.add_argument("--largest", action="store_true", help="only the largest number that each key takes")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seed", type=int, default=0, help="of the values of each key, and of the pairs")
    parser.add_argument("--seconds", type=int, default=60, help="of a case; a hang ends there")
    parser.add_argument("--out", type=Path, help="a file for a row of JSON per case")
    parser.add_argument("--from-case", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.from_case is not None:
        return run_cases(asked)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        rows = run_processes(asked, Path(folder))
    return report(rows)


def all_cases(seed: int, folder: Path) -> list[dict[str, Any]]:
    """Every case: its name, and the words of a command or the number of a call."""
    from jaxtrain.config import Config, load_config
    from jaxtrain.config.keys import walk

    draw = random.Random(seed)
    cases: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for base in BASES:
        config = load_config(str(folder / f"{base}.yaml")).config
        for key in walk(Config, config):
            kind = getattr(getattr(config, key.path.partition(".")[0]), "kind", "")
            if (kind, key.path) in seen:
                continue
            seen.add((kind, key.path))
            for name in draw.sample(sorted(VALUES), 2):
                cases.append(train_case(base, {key.path: name}))
        keys = [key.path for key in walk(Config, config)]
        for _ in range(2):
            cases.append(train_case(base, {key: draw.choice(sorted(VALUES)) for key in draw.sample(keys, 2)}))
    cases += [{"name": f"command {' '.join(words)[:80]!r}", "words": words} for words in COMMANDS]
    for file in sorted((folder / "wrong").iterdir()):
        cases.append({"name": f"file {file.name}", "words": ["train", str(file), "train.steps=1"]})
    cases += [{"name": f"fit {text}", "fit": text} for text in FITS]
    return cases


def largest_cases(folder: Path) -> list[dict[str, Any]]:
    """A case for each key of a number: the largest one that the schema takes."""
    from jaxtrain.config import Config, load_config
    from jaxtrain.config.keys import walk
    from jaxtrain.errors import ConfigError

    cases, seen = [], set()
    for base in BASES:
        path = str(folder / f"{base}.yaml")
        config = load_config(path).config
        for key in walk(Config, config):
            kind = getattr(getattr(config, key.path.partition(".")[0]), "kind", "")
            if (kind, key.path) in seen or not any(word in key.type for word in ("int", "number")):
                continue
            seen.add((kind, key.path))
            for value in LARGEST:
                with contextlib.suppress(ConfigError):
                    load_config(path, overrides=[f"{key.path}={value}"])
                    words = [f"{key.path}={value}"]
                    cases.append({"name": f"{base} {words[0]}", "base": base, "words": words})
                    break
    return cases


def train_case(base: str, values: Mapping[str, str]) -> dict[str, Any]:
    """A config of `BASES` with some keys set to values of `VALUES`."""
    words = [f"{key}={VALUES[name]}" for key, name in values.items()]
    return {"name": f"{base} {' '.join(f'{key}={name}' for key, name in values.items())}", "base": base, "words": words}


def run_processes(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the cases in one process after another, and goes on behind a case that ended its process."""
    write_files(folder)
    cases = largest_cases(folder) if asked.largest else all_cases(asked.seed, folder)
    cases = [case for case in cases if asked.only in case["name"]]
    if asked.cases is not None:
        step = max(1, len(cases) // asked.cases)
        cases = cases[::step]
    (folder / "cases.json").write_text(json.dumps(cases))
    out = folder / "rows.jsonl"
    out.touch()
    done = 0
    while done < len(cases):
        command = [sys.executable, __file__, "--from-case", str(done), "--seconds", str(asked.seconds)]
        command += ["--out", str(folder)]
        known = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "JAXTRAIN_CACHE_DIR": str(folder / "cache")}
        ended = subprocess.run(
            command, check=False, stderr=subprocess.PIPE, text=True, errors="replace", env=os.environ | known
        )
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        if len(rows) == done or (ended.returncode != 0 and len(rows) < len(cases)):
            lines = ended.stderr.strip().splitlines()[-1:] or [""]
            row = {
                "code": ended.returncode,
                "line": f"the process ended: {lines[0][:200]}",
                "loss": None,
                "bad": "crash",
            }
            with out.open("a") as file:
                file.write(json.dumps(cases[len(rows)] | row) + "\n")
            rows = [json.loads(line) for line in out.read_text().splitlines()]
        done = len(rows)
        print(f"{done} of {len(cases)}: {sum(bool(row['bad']) for row in rows)} bad", file=sys.stderr, flush=True)
    if asked.out:
        shutil.copy(out, asked.out)
    return rows


def run_cases(asked: argparse.Namespace) -> int:
    """Runs cases of a list in this process, and writes a row for each."""
    import jax

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = asked.out
    cases = json.loads((folder / "cases.json").read_text())[asked.from_case :][:PER_PROCESS]
    os.chdir(folder)
    with (folder / "rows.jsonl").open("a") as rows:
        for case in cases:
            shutil.rmtree(folder / "runs", ignore_errors=True)
            found = run_case(case, folder, asked.seconds)
            rows.write(json.dumps(case | found) + "\n")
            rows.flush()
        jax.clear_caches()
    return 0


def run_case(case: Mapping[str, Any], folder: Path, seconds: int) -> dict[str, Any]:
    """Runs one case: its exit code, its last line, its loss, and what is bad about it."""
    errors, output = io.StringIO(), io.StringIO()
    run_dir = folder / "runs" / "case"
    before = {path.name for path in folder.iterdir()}
    try:
        with alarm(seconds), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            code = call_fit(case["fit"], run_dir) if "fit" in case else call_main(case, folder, run_dir)
    except HangError:
        return {"code": None, "line": f"over {seconds} s", "loss": None, "bad": "hang"}
    except BaseException as error:
        return {"code": None, "line": repr(error)[:300], "loss": None, "bad": "raised"}
    text = errors.getvalue()
    line = (text.strip().splitlines() or [""])[-1]
    loss = last_loss(run_dir)
    return {
        "code": code,
        "line": line[:300],
        "loss": loss,
        "bad": mistake(code, text, line, loss, case, folder, before),
    }


def mistake(
    code: int, text: str, line: str, loss: float | None, case: Mapping[str, Any], folder: Path, before: set[str]
) -> str:
    """What is bad about the end of a case; empty where nothing is."""
    if "Traceback" in text or "internal error" in text:
        return "traceback"
    if any(character < " " and character not in "\n\t" for character in text):
        return "control characters"
    # Checkpoints go where checkpoint.directory says.
    asked_for = "checkpoint.directory" in case["name"]
    if not asked_for and {path.name for path in folder.iterdir()} - before - {"runs", "cache"}:
        return f"wrote outside of runs: {sorted({path.name for path in folder.iterdir()} - before)}"
    if code in (2, 3):
        return "" if line.startswith("jaxtrain") or "fit" in case else "no line of ours"
    if code == 0:
        trained = "fit" in case or case["words"][:1] == ["train"] or "base" in case
        is_right = not trained or loss is None or math.isfinite(loss) or case["name"] in NO_LOSS
        return "" if is_right else "the loss is not finite"
    return f"exit code {code}"


def call_main(case: Mapping[str, Any], folder: Path, run_dir: Path) -> int:
    """A command in this process."""
    from jaxtrain.cli import main as run_command

    words = list(case["words"])
    if "base" in case:
        words = ["train", str(folder / f"{case['base']}.yaml"), *words]
        if not any(word.startswith("name=") for word in words):
            words += ["--run-dir", str(run_dir)]
    return run_command(words)


def call_fit(text: str, run_dir: Path) -> int:
    """A call of `jaxtrain.fit` with one argument that makes no sense."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxtrain as jt

    def apply(params: Any, inputs: Any) -> Any:
        return inputs @ params["w"]

    x, y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
    given: dict[str, Any] = {
        "model": jt.from_functions(lambda key: {"w": jnp.zeros((4, 3))}, apply),
        "data": {"inputs": x, "targets": y},
        "steps": 1,
        "batch_size": 4,
        "run_dir": run_dir,
        "logging": {"report": False, "tensorboard": False},
        "optimizer": optax.sgd(0.1),
    }
    given |= eval(f"dict({text})", {"np": np, "inf": math.inf, "nan": math.nan, "x": x, "y": y})
    model, optimizer = given.pop("model"), given.pop("optimizer")
    try:
        jt.fit(model, jt.classification(), optimizer, **given)
    except jt.UserError as error:
        print(f"jaxtrain: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return error.exit_code
    return 0


def last_loss(run_dir: Path) -> float | None:
    """The loss of the last row of metrics that has one."""
    with contextlib.suppress(OSError):
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        return math.nan if losses and losses[-1] is None else losses[-1] if losses else None
    return None


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Raises HangError in the block after some seconds."""

    def ring(number: int, frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def report(rows: list[dict[str, Any]]) -> int:
    """Prints what was taken, then what was met badly; returns the exit code."""
    for row in rows:
        if row["code"] == 0:
            print(f"taken    {row['name']}" + ("" if row["loss"] is None else f"  loss {row['loss']:.4g}"))
    bad = [row for row in rows if row["bad"]]
    for row in bad:
        print(f"BAD      {row['name']}: {row['bad']} (exit {row['code']}): {row['line']}")
    refused, taken = sum(row["code"] in (2, 3) for row in rows), sum(row["code"] == 0 for row in rows)
    print(f"{len(rows)} cases: {refused} refused in one line, {taken} taken, {len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
