"""The analytic memory against what compilers said of the same steps: state within 1 %, the peak within 15 %.

`compiled.json` holds what compilers said on one day; `scripts/compile_memory.py` makes such rows, and `test_exact.py`
compiles anew.
"""

import json
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import find, target_of
from jaxtrain.plan.search.analyse import analyse

ROWS = json.loads((Path(__file__).parent / "compiled.json").read_text())["rows"]
_GIB = 2**30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['target']} {row['config']}")
def test_memory_is_the_compiler_s(row: dict) -> None:
    name, count = row["target"].split(" x ")
    config, *overrides = row["config"].split()
    target = target_of(find(name), int(count))
    loaded = load_config(config, overrides=overrides)
    estimate = analyse(loaded.config, target)
    # The figures of the file are rounded to a thousandth of a GiB.
    assert estimate.memory.state_bytes == pytest.approx(row["state_bytes"], rel=0.01, abs=2**20)
    assert estimate.memory.total_bytes == pytest.approx(row["peak_bytes"], rel=0.15)
