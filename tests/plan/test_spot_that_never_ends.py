"""Spot devices on which a run gets little done: no price of hundreds of digits, and the true reason."""

import re

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.report.show import table
from jaxtrain.plan.search.analyse import Terms, analyse

# id: (config, interruptions of a node an hour, seconds between saves (None: Young's), what the row says)
ROWS = {
    "once a day": ("llama3_8b", 1 / 24, None, r"\$[\d,]+ in "),
    "every second": ("llama3_8b", 3600.0, None, "not sensible: interruptions and saves"),
    "a run of a moment": (
        "digits_mlp",
        1 / 24,
        None,
        "not sensible: interruptions and saves",
    ),
    "saves without end": ("llama3_8b", 1 / 24, 0.1, "not sensible: interruptions and saves"),
}


@pytest.mark.parametrize(("config", "rate", "interval", "said"), ROWS.values(), ids=ROWS)
def test_spot_row(config, rate, interval, said):
    terms = Terms(interruptions_per_node_hour=rate, checkpoint_interval_seconds=interval)
    shown = table([analyse(load_config(config).config, parse_targets("h100x8")[0], terms)])
    (row,) = [line for line in shown.splitlines() if line.startswith("  spot  ")]
    assert re.search(said, row)


LONG = ("parallel.fsdp=8", "train.accumulation_steps=1", "train.steps=1000000")
# id: (config, overrides, bytes of a checkpoint: 12 per trained number with AdamW, and 4 per frozen one that it holds)
SAVES = {
    "adapters": ("llama3.1_8b_lora", ["finetune.lora.rank=512"], 12 * 32 * 41_943_040),
    "adapters over nf4": ("llama2_13b_nf4", ["finetune.lora.rank=512"], 12 * 32 * 62_586_880),
    "frozen blocks": ("llama3_8b", ["optimizer.freeze=['blocks/*']"], 12 * 1_050_677_248 + 4 * 6_979_584_000),
}


@pytest.mark.parametrize(("name", "overrides", "saved"), SAVES.values(), ids=SAVES)
def test_a_save_of_adapters_is_without_their_base(name, overrides, saved):
    config = load_config(name, overrides=[*overrides, *LONG], weights=False).config
    terms = Terms(interruptions_per_node_hour=1e-9, checkpoint_interval_seconds=3600)
    cost = analyse(config, parse_targets("h100x8")[0], terms).cost
    assert cost is not None
    assert cost.spot is not None
    # An hour's work, and what the save after it takes: all that is lost where nothing is interrupted.
    assert (1 / cost.spot.efficiency - 1) * 3600 == pytest.approx(saved / 1e9, rel=1e-3)
