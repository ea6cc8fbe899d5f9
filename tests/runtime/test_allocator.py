"""The command starts itself again with malloc's settings once, where that changes something."""

import json
import os
import subprocess
import sys

import pytest

from jaxtrain.runtime.allocator import SETTINGS, restart_environment


@pytest.mark.parametrize(
    ("environment", "accelerator", "restarts"),
    [
        ({"HOME": "/root"}, False, True),
        ({"HOME": "/root"}, True, False),
        ({"MALLOC_ARENA_MAX": "2"}, False, False),
        ({"GLIBC_TUNABLES": ""}, False, False),
        (SETTINGS, False, False),
    ],
)
def test_who_restarts(monkeypatch, environment, accelerator, restarts) -> None:
    monkeypatch.setattr("jaxtrain.runtime.allocator.platform.libc_ver", lambda: ("glibc", "2.36"))
    found = restart_environment(environment, accelerator=accelerator)
    assert found == ({**environment, **SETTINGS} if restarts else None)
    monkeypatch.setattr("jaxtrain.runtime.allocator.platform.libc_ver", lambda: ("musl", "1.2"))
    assert restart_environment(environment, accelerator=accelerator) is None


def test_the_process_is_the_same_and_its_words_too() -> None:
    """A program that prints its process number before and after, restarting in between."""
    program = (
        "import json, os, sys; from jaxtrain.runtime.allocator import restart, SETTINGS; "
        "print(json.dumps([os.getpid(), sys.argv[1:], all(name in os.environ for name in SETTINGS)]), flush=True); "
        "restart(accelerator=False)"
    )
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS and "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, "two words", "key=value"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    before, after = (json.loads(line) for line in done.stdout.splitlines())
    assert before[0] == after[0]
    assert before[1] == after[1] == ["two words", "key=value"]
    assert (before[2], after[2]) == (False, True)
