"""Every test process has 8 emulated CPU devices, and a compilation cache that the processes of one run share.

Plain `pytest` leaves out the tests marked `long`; `pytest --all` runs them too. `--passed-elsewhere=FILE` leaves out
what another Python proved (`other_python.py`).
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import pytest
from other_python import left_out

from jaxtrain.cli import main
from jaxtrain.runtime import distributed

# A suite started in the background ignores Ctrl-C (and SIGHUP under nohup), and so would every process of a test.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Subprocesses inherit this; workers of pytest-xdist share the folder of the run that started them.
os.environ.setdefault("JAXTRAIN_CACHE_DIR", tempfile.mkdtemp(prefix="jaxtrain-tests-"))
os.environ["JAX_PLATFORMS"] = "cpu"
# What the tests prove is decided before LLVM, whose optimizations take a third of compiling small models for the CPU.
# Steps take longer without them: a test that trains a shipped config starts a process with flags of its own.
# Machine code of a program is made in one part: the cores are taken by other workers.
COMPILER_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if jaxlib.version.__version_info__ < (0, 11):
    # The emitters of fusions take half of the time of compiling there, and no test is about them. Later compilers have
    # no others and end the process where they are given a flag that they do not know.
    COMPILER_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *COMPILER_FLAGS]).strip()
distributed.start(emulate=8)
# Small programs too: reading one takes a millisecond, and compiling it ten times that.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

ROOT = Path(__file__).resolve().parent.parent
# Ids of all tests that plain `pytest` runs, where all tests were collected.
PLAIN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked 'long'")
    told = "leave out what needs one Python only and passed in the run that wrote FILE with --junitxml"
    parser.addoption("--passed-elsewhere", metavar="FILE", help=told)


@pytest.hookimpl(tryfirst=True)  # before -k and -m leave out others
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests unless `--all`, `-m` or the id of a test asks for them; then what passed elsewhere."""
    paths = [config.invocation_params.dir / word for word in config.args]
    if paths == [ROOT / "tests"] and not config.getoption("lf", False):
        config.stash[PLAIN] = [item.nodeid for item in items if not item.get_closest_marker("long")]
    gone: frozenset[str] | set[str] = frozenset()
    if not (config.option.all or config.option.markexpr or any("::" in word for word in config.args)):
        gone = {item.nodeid for item in items if item.get_closest_marker("long")}
    elif config.option.passed_elsewhere is not None:
        gone = left_out(config.invocation_params.dir / config.option.passed_elsewhere)
    dropped = [item for item in items if item.nodeid in gone]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item.nodeid not in gone]
    getattr(config, "workeroutput", {})["left_out"] = len(dropped)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through modules and thousands of tests again and again.

    Tracing and parsing make objects by the million, most of which live on: it looks at 20,000 at a time, not 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(scope="session")
def plain_tests(pytestconfig: pytest.Config) -> list[str]:
    """Ids of all tests that plain `pytest` runs, as it says itself where this run collected a part of them."""
    if PLAIN in pytestconfig.stash:
        return pytestconfig.stash[PLAIN]
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Count what the workers left out in the summary line, which pytest-xdist does not; each leaves out the same."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    reporter.stats["deselected"] = [None] * getattr(node, "workeroutput", {}).get("left_out", 0)


@dataclass(frozen=True)
class Answer:
    """What a command left: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys) -> Callable[..., Answer]:
    """Runs `jaxtrain` in this process."""

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = main(words)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call
