"""The collector rests while a command starts, and is never taken from somebody who set it."""

import gc
import subprocess
import sys

import pytest

from jaxtrain.runtime import collector


@pytest.fixture
def collecting():
    was = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was else gc.disable)()


def test_it_rests_and_comes_back(collecting):
    gc.enable()
    collector.pause()
    assert not gc.isenabled()
    collector.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_who_turned_it_off_keeps_it_off(collecting):
    gc.disable()
    collector.pause()
    collector.resume()
    assert not gc.isenabled()


@pytest.mark.long
def test_a_command_trains_with_it(tmp_path):
    script = (
        "import gc, sys; sys.argv = ['jaxtrain', *sys.argv[1:]]; from jaxtrain import cli;"
        "cli.restart = lambda accelerator: None; code = cli.main();"
        "print('collects', gc.isenabled(), gc.get_freeze_count() > 0); sys.exit(code)"
    )
    words = ["train", "digits_mlp", "train.steps=2", "logging.report=false", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "collects True True"
