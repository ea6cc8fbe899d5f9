"""Devices of hardware that is not here: what they are, what a name may be, and what is said when a compiler is missing.

Each kind runs in a process of its own, because a plugin cannot be unloaded and jax is started once.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.plan.topology import CompilerMissingError, topology_devices

# Prints {name: [devices, platform, kind, hosts]} or the error.
DESCRIBE = """
import json, sys
from jaxtrain.errors import ConfigError
from jaxtrain.plan.topology import topology_devices
found = {}
for name in sys.argv[1:]:
    try:
        devices = topology_devices(name)
        hosts = len({device.process_index for device in devices})
        found[name] = [len(devices), devices[0].platform, devices[0].device_kind, hosts]
    except ConfigError as error:
        found[name] = str(error)
print(json.dumps(found))
"""
TPUS = {
    "v5e:2x4": [8, "tpu", "TPU v5 lite", 2],
    "v6e:16x16": [256, "tpu", "TPU v6 lite", 64],
    "v5p:2x2x2": [8, "tpu", "TPU v5", 2],
    "v5e:1x1": [1, "tpu", "TPU v5 lite", 1],
    "tpu7x:2x2x1": [8, "tpu", "TPU7x", 1],  # two devices a chip
}
GPUS = {
    "h100:1x8": [8, "gpu", "NVIDIA H100 80GB HBM3", 1],
    "h100:2x8": [16, "gpu", "NVIDIA H100 80GB HBM3", 2],
}


@pytest.mark.parametrize(("package", "wanted"), [("libtpu", TPUS), ("jax_cuda12_plugin", GPUS)], ids=["tpu", "gpu"])
def test_devices(package, wanted):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[aot,aot-tpu]'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
    wrong = ["v5e:3x3"] if package == "libtpu" else []
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE, *wanted, *wrong], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in wrong:
        assert found.pop(name).startswith("no TPU slice v5e:3x3: INVALID_ARGUMENT: ")
    assert found == wanted


@pytest.mark.parametrize("name", ["v9:2x2", "v5e:8", "h100:1x2x8"])
def test_wrong_names(name):
    with pytest.raises(ConfigError, match=f"no hardware '{name}' of v5e, .*write TYPE:SHAPE, as in v5e:2x4"):
        topology_devices(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x4", "aot-tpu"), ("h100:1x8", "aot")], ids=["tpu", "gpu"])
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(CompilerMissingError, match=rf"which is not installed: pip install '\.\[{extra}\]'"):
        topology_devices(name)
