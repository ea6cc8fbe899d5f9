"""Rates from host times, and the keys of a row of metrics.jsonl."""

import pytest

from jaxtrain.metrics.throughput import Meter, device_memory_bytes


def _row(meter, step):
    return meter.row(step, loss=1.0, grad_norm=2.0, learning_rate=0.1, skipped_steps=0, device_memory_bytes=None)


@pytest.mark.parametrize("unit", ["tokens", "examples"])
def test_row_has_the_keys_of_the_design(unit):
    assert list(_row(Meter(unit, 100), 1)) == [
        "step", "loss", "grad_norm", "learning_rate", unit, f"{unit}_per_second", "step_seconds",
        "data_wait_seconds", "model_flops_utilization", "device_memory_bytes", "skipped_steps",
    ]  # fmt: skip


def test_rates_are_of_the_window_and_counts_of_the_run():
    meter = Meter("tokens", 100, flops_per_step=50.0, peak_flops=200.0)
    for step, seconds, wait in ((11, 0.5, 0.1), (12, 0.5, 0.0), (13, 3.0, 0.2)):
        meter.record(step, seconds, wait)
    row = _row(meter, 13)
    assert row["tokens"] == 1300
    assert row["tokens_per_second"] == pytest.approx(300 / 4.0)
    assert row["step_seconds"] == 0.5
    assert row["data_wait_seconds"] == pytest.approx(0.1)
    assert row["model_flops_utilization"] == pytest.approx(3 * 50 / 4.0 / 200)
    # A row starts a new window: the slow step is gone.
    meter.record(14, 0.25, 0.0)
    assert _row(meter, 14)["tokens_per_second"] == pytest.approx(400)


@pytest.mark.parametrize(
    ("flops", "peak"),
    [pytest.param(None, 1e12, id="unknown-flops"), pytest.param(1e9, None, id="unknown-peak")],
)
def test_utilization_is_none_when_something_is_unknown(flops, peak):
    meter = Meter("tokens", 1, flops_per_step=flops, peak_flops=peak)
    meter.record(1, 1.0, 0.0)
    assert meter.rates()["model_flops_utilization"] is None


def test_empty_window_gives_none():
    assert set(Meter("examples", 1, flops_per_step=1.0, peak_flops=1.0).rates().values()) == {None}


def test_metrics_of_the_task_are_appended():
    row = Meter("examples", 1).row(
        1, loss=1.0, grad_norm=1.0, learning_rate=1.0, skipped_steps=0, device_memory_bytes=5, more={"accuracy": 0.5}
    )
    assert row["accuracy"] == 0.5
    assert row["device_memory_bytes"] == 5


def test_cpu_gives_no_device_memory():
    assert device_memory_bytes() is None
