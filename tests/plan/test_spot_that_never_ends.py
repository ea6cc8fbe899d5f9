"""Spot devices that are taken away faster than a run restarts: no price of hundreds of digits."""

import re

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.report.show import table
from jaxtrain.plan.search.analyse import Terms, analyse

# id: (interruptions of a node an hour, what the row says)
ROWS = {"once a day": (1 / 24, r"\$[\d,]+ in "), "every second": (3600.0, "not sensible: interrupted every 1")}


@pytest.mark.parametrize(("rate", "said"), ROWS.values(), ids=ROWS)
def test_spot_row(rate, said):
    terms = Terms(interruptions_per_node_hour=rate)
    shown = table([analyse(load_config("llama3_8b").config, parse_targets("h100x8")[0], terms)])
    (row,) = [line for line in shown.splitlines() if line.startswith("  spot  ")]
    assert re.search(said, row)
