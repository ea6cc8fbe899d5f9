"""What share of the bytes that a step sends is sent beside matmuls, in programs of compilers of absent hardware.

The bounds are what `scripts/overlap.py` measured (docs/benchmarks.md), less what rounding takes. The layers of a cut
model stand in the loop that those of a deep one do; what stands outside it (the embedding, the head, the first and
last layer) weighs more, so that the share of a deep model is higher.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "overlap.py"
# id: (package of the compiler, target, layout, layers and overrides, least share of all bytes, least share by kind).
_BF16_MOMENTS = "optimizer.moments=bfloat16"  # with float32 moments the state of all layers does not fit under data=8
ROWS = {
    "h100 fsdp": ("jax_cuda12_plugin", "h100x8", "fsdp=8", [32], 0.90, {"all-gather": 0.92, "reduce-scatter": 0.85}),
    "h100 data": ("jax_cuda12_plugin", "h100x8", "data=8", [8], 0.71, {}),
    "h200 data": ("jax_cuda12_plugin", "h200x8", "data=8", [32, _BF16_MOMENTS], 0.90, {}),
    "v5e fsdp": ("libtpu", "v5e-8", "fsdp=8", [8], 0.64, {"all-gather": 0.74, "reduce-scatter": 0.73}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_share_of_bytes_beside_matmuls(name):
    package, target, layout, (layers, *overrides), share, by_kind = ROWS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'jaxtrain[aot,aot-tpu]'")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--on", target, "--only", layout, "--layers", str(layers), "--json", *overrides],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["overlapped"] >= share
    for kind, least in by_kind.items():
        assert found["kinds"][kind][1] >= least, kind
