"""Every test process has 8 emulated CPU devices, and a compilation cache that the processes of one run share."""

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from jaxtrain.cli import main
from jaxtrain.runtime import distributed

# A suite started in the background ignores Ctrl-C (and SIGHUP under nohup), and so would every process of a test.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Subprocesses inherit this; workers of pytest-xdist share the folder of the run that started them.
os.environ.setdefault("JAXTRAIN_CACHE_DIR", tempfile.mkdtemp(prefix="jaxtrain-tests-"))
os.environ["JAX_PLATFORMS"] = "cpu"
distributed.start(emulate=8)


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
