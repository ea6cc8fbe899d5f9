"""Every schedule at the steps where it turns, against values worked out by hand."""

import math

import numpy as np
import pytest

from jaxtrain.config.optimizers import ScheduleConfig
from jaxtrain.errors import ConfigError
from jaxtrain.optim.optimizers import build_schedule

PEAK, STEPS = 0.5, 100
COSINE_MIDDLE = 0.05 + 0.45 * 0.5 * (1 + math.cos(math.pi * 0.5))

# config, step -> learning rate; the peak is 0.5, the run 100 steps.
CASES = {
    "constant": (dict(kind="constant"), {0: 0.5, 50: 0.5, 99: 0.5, 1000: 0.5}),
    "constant with warmup": (
        dict(kind="constant", warmup_steps=4),
        {0: 0.1, 1: 0.2, 3: 0.4, 4: 0.5, 99: 0.5, 1000: 0.5},
    ),
    "linear": (dict(kind="linear"), {0: 0.5, 50: 0.275, 100: 0.05, 1000: 0.05}),
    "linear with warmup": (
        dict(kind="linear", warmup_steps=20),
        {0: 0.5 / 21, 10: 0.5 * 11 / 21, 19: 0.5 * 20 / 21, 20: 0.5, 60: 0.275, 100: 0.05, 1000: 0.05},
    ),
    "linear to zero by step 40": (
        dict(kind="linear", decay_steps=40, final_fraction=0.0),
        {0: 0.5, 20: 0.25, 40: 0.0, 99: 0.0},
    ),
    "cosine": (dict(kind="cosine"), {0: 0.5, 50: COSINE_MIDDLE, 100: 0.05, 1000: 0.05}),
    "cosine with warmup": (
        dict(kind="cosine", warmup_steps=20),
        {0: 0.5 / 21, 19: 0.5 * 20 / 21, 20: 0.5, 60: COSINE_MIDDLE, 100: 0.05, 1000: 0.05},
    ),
    "cosine at a quarter": (
        dict(kind="cosine", final_fraction=0.0),
        {25: 0.25 * (1 + math.cos(math.pi / 4)), 75: 0.25 * (1 + math.cos(3 * math.pi / 4))},
    ),
    "wsd": (
        dict(kind="wsd", warmup_steps=10),
        {0: 0.5 / 11, 9: 0.5 * 10 / 11, 10: 0.5, 89: 0.5, 90: 0.5, 95: 0.275, 100: 0.05, 1000: 0.05},
    ),
    "wsd with a decay of its own": (
        dict(kind="wsd", decay_steps=40, final_fraction=0.0),
        {0: 0.5, 60: 0.5, 80: 0.25, 100: 0.0, 1000: 0.0},
    ),
    "wsd without a plateau": (
        dict(kind="wsd", warmup_steps=50, decay_steps=50, final_fraction=0.0),
        {49: 0.5 * 50 / 51, 50: 0.5, 75: 0.25, 100: 0.0},
    ),
    "inverse sqrt": (dict(kind="inverse_sqrt"), {0: 0.5, 3: 0.25, 99: 0.05}),
    "inverse sqrt with warmup": (
        dict(kind="inverse_sqrt", warmup_steps=16),
        {0: 0.5 / 17, 15: 0.5 * 16 / 17, 16: 0.5, 64: 0.25, 1600: 0.05},
    ),
}


@pytest.mark.parametrize(("settings", "rates"), CASES.values(), ids=CASES)
def test_schedule(settings, rates):
    schedule = build_schedule(ScheduleConfig(**settings), peak=PEAK, steps=STEPS)
    found = {step: float(schedule(np.int32(step))) for step in rates}
    # fp32 arithmetic of a few operations, and cos.
    assert found == pytest.approx(rates, rel=1e-5, abs=1e-7)


def test_a_schedule_longer_than_the_run_is_refused():
    for settings, message in (
        (dict(kind="cosine", warmup_steps=50, decay_steps=50), "decay_steps=50 does not fit between warmup_steps=50"),
        (dict(kind="wsd", warmup_steps=61, decay_steps=40), "does not fit between warmup_steps=61 and train.steps=100"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_schedule(ScheduleConfig(**settings), peak=PEAK, steps=STEPS)
