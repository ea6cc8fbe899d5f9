"""One decode step of the engine reads its weights and its cache once, by the compilers of hardware that is not here."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "decode_bytes.py"

# Widths of Llama-3 8B over eight devices. On a GPU layers are written out, and two take as long to compile as is worth
# it. A TPU scans them; of a few layers it would fetch the whole stack into a core's memory, at every turn of the loop.
ROWS = {
    "h100, bf16": ("h100:1x8", "jax_cuda12_plugin", 2, "bf16", "bf16"),
    "h100, int8": ("h100:1x8", "jax_cuda12_plugin", 2, "int8", "int8"),
    "v5e, bf16": ("v5e:2x4", "libtpu", 12, "bf16", "bf16"),
    "v5e, int8": ("v5e:2x4", "libtpu", 12, "int8", "int8"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_a_decode_step_moves_little_more_than_weights_and_cache(name: str, tmp_path: Path) -> None:
    target, package, layers, weights, cache = ROWS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'jaxtrain[aot,aot-tpu]'")
    answer = tmp_path / "rows.json"
    words = [f"--targets={target}", f"--layers={layers}", f"--weights={weights}", f"--caches={cache}"]
    # Those of the tests' emulated devices hold a flag that libtpu ends the process for.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, f"--json={answer}"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(answer.read_text())
    # Issue 15's bound. Of a model cut so short the logits and what penalties read weigh 12 to 17 % on the H100 row.
    assert row["needed_bytes"] <= row["moved_bytes"] <= 1.2 * row["needed_bytes"], row["largest"]
