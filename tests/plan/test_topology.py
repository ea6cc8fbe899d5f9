"""Devices of hardware that is not here: what they are, what a name may be, and what is said when a compiler is missing.

Each case runs in a process of its own, because a plugin cannot be unloaded and jax is started once.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.plan.topology import CompilerMissingError, topology_devices

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'jaxtrain[aot-tpu]'"
)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="jax's CUDA plugin is not installed: pip install 'jaxtrain[aot]'",
)

# Prints {name: [devices, platform, kind, hosts]} or the error, and then the environment variables that were left.
DESCRIBE = """
import json, os, sys
import jax  # which sets variables itself
from jaxtrain.errors import ConfigError
from jaxtrain.plan.topology import topology_devices
before = dict(os.environ)
found = {}
for name in sys.argv[1:]:
    try:
        devices = topology_devices(name)
        hosts = len({device.process_index for device in devices})
        found[name] = [len(devices), devices[0].platform, devices[0].device_kind, hosts]
    except ConfigError as error:
        found[name] = str(error)
found["environment"] = sorted(set(os.environ.items()) - set(before.items()))
print(json.dumps(found))
"""


def run(program: str, *words: str, **variables: str) -> str:
    """What the program prints; nothing may come on standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | variables,
    )
    assert done.returncode == 0, done.stderr
    # What importing jax 0.10.2 prints where its CUDA plugin is installed and there is no driver.
    on_import = re.compile(r"WARNING: All log messages before absl|.*cudart_stub\.cc.* Could not find cuda drivers")
    assert [line for line in done.stderr.splitlines() if not on_import.match(line)] == []
    return done.stdout


@needs_libtpu
def test_tpu_slices():
    names = ["v5e:2x4", "v6e:2x4", "v5p:2x2x2", "v5e:1x1", "v6e:16x16", "tpu7x:2x2x1"]
    found = json.loads(run(DESCRIBE, *names, "v5e:3x3", JAX_PLATFORMS="cpu"))
    wrong = found.pop("v5e:3x3")
    assert found == {
        "v5e:2x4": [8, "tpu", "TPU v5 lite", 2],
        "v6e:2x4": [8, "tpu", "TPU v6 lite", 2],
        "v5p:2x2x2": [8, "tpu", "TPU v5", 2],
        "v5e:1x1": [1, "tpu", "TPU v5 lite", 1],
        "v6e:16x16": [256, "tpu", "TPU v6 lite", 64],
        "tpu7x:2x2x1": [8, "tpu", "TPU7x", 1],  # two devices a chip
        "environment": [],
    }
    assert wrong.startswith("no TPU slice v5e:3x3: INVALID_ARGUMENT: ")
    assert "\n" not in wrong


@needs_cuda
def test_gpu_hosts():
    assert json.loads(run(DESCRIBE, "h100:1x8", "h100:2x8", "h100:1x1")) == {
        "h100:1x8": [8, "gpu", "NVIDIA H100 80GB HBM3", 1],
        "h100:2x8": [16, "gpu", "NVIDIA H100 80GB HBM3", 2],
        "h100:1x1": [1, "gpu", "NVIDIA H100 80GB HBM3", 1],
        "environment": [],
    }


@pytest.mark.parametrize("name", ["v9:2x2", "v5e:8", "h100:1x2x8"])
def test_wrong_names(name):
    with pytest.raises(ConfigError, match=f"no hardware '{name}' of v5e, .*write TYPE:SHAPE, as in v5e:2x4"):
        topology_devices(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x4", "aot-tpu"), ("h100:1x8", "aot")], ids=["tpu", "gpu"])
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(CompilerMissingError, match=rf"which is not installed: pip install 'jaxtrain\[{extra}\]'"):
        topology_devices(name)
