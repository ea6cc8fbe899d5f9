"""The command starts itself again with malloc's settings once, where that changes something."""

import json
import os
import platform
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_free_memory_of_the_heap_is_given_back() -> None:
    """With the settings above malloc keeps 64 MiB that were freed below a block that is in use."""
    program = (
        "from jaxtrain.runtime.heap import give_back_free_memory\n"
        "def resident():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "large = bytearray(2**26)\n"
        "above = bytearray(2**20)\n"
        "del large\n"
        "before = resident()\n"
        "give_back_free_memory()\n"
        "print(before - resident())\n"
    )
    environment = {**os.environ, **SETTINGS}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    # Some of a large block may be taken for what is printed.
    assert int(done.stdout) > 2**25
