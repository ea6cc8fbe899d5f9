"""Which GPUs of a machine each of several processes sees; cards are files of the test."""

import re
import subprocess
import sys

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.runtime import devices
from jaxtrain.runtime.devices import gpu_shares, visible_gpus


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that makes this a machine with cards that the driver lists, files for them, and an environment."""

    def make(cards, files, environment):
        for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(devices, "_DEVICES", tmp_path / "dev")
        monkeypatch.setattr(devices, "_DRIVER", tmp_path / "gpus")
        (tmp_path / "dev").mkdir()
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", *(f"nvidia{index}" for index in files)):
            (tmp_path / "dev" / name).touch()
        for index in range(cards):
            (tmp_path / "gpus" / f"0000:{index:02}:00.0").mkdir(parents=True)

    return make


# id: (cards that the driver lists, numbers of their device files, environment, what is found)
FOUND = {
    "no driver": (0, (), {}, []),
    "a machine": (4, (0, 1, 2, 3), {}, ["0", "1", "2", "3"]),
    "a container with two of them": (4, (2, 3), {}, ["0", "1"]),
    "a list": (4, (0, 1, 2, 3), {"CUDA_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
    "a list that ends": (4, (0, 1, 2, 3), {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ["1"]),
    "on the CPU": (4, (0, 1, 2, 3), {"JAX_PLATFORMS": "cpu"}, None),
    "chosen by the user": (4, (0, 1, 2, 3), {"JAX_LOCAL_DEVICE_IDS": "0"}, None),
}


@pytest.mark.parametrize(("cards", "files", "environment", "found"), FOUND.values(), ids=FOUND)
def test_the_gpus_of_this_machine(machine, cards, files, environment, found):
    machine(cards, files, environment)
    assert visible_gpus() == found


def test_gpus_that_cannot_be_shared_out():
    line = "--processes 3: 4 GPUs of this machine cannot be shared out equally; use --processes 1 or 2 or 4,"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        gpu_shares(["0", "1", "2", "3"], 3)


def launched(monkeypatch, *words):
    show = 'echo "$JAX_PROCESS_ID sees $CUDA_VISIBLE_DEVICES" >&2'
    command = [sys.executable, "-m", "jaxtrain", "launch", "--processes", "2", *words, "--", "sh", "-c", show]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, sorted(line.removeprefix("[1] ") for line in done.stderr.splitlines())


def test_launch_gives_each_process_its_share(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert launched(monkeypatch) == (0, ["0 sees 4,5", "1 sees 6,7"])
    # Emulated devices take no card, and the variable stays as it is.
    assert launched(monkeypatch, "--emulate", "2") == (0, ["0 sees 4,5,6,7", "1 sees 4,5,6,7"])
