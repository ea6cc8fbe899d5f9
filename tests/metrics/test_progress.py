"""What people see: plain lines, the live view, numbers as text, and the remaining time."""

import io
import math
import sys

import pytest

from jaxtrain.metrics.eta import RemainingTime, Trend
from jaxtrain.metrics.format import format_bytes, format_clock, format_count, format_duration, sparkline
from jaxtrain.metrics.progress import Progress, describe

_ROW = {"loss": 4.7119, "step": 1, "tokens": 1210, "tokens_per_second": 12_100.0, "data_wait_seconds": 0.001}


class _Clock:
    """A steady clock that moves when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr("jaxtrain.metrics.progress.time.monotonic", clock)
    return clock


def _plain(**settings):
    errors, output = io.StringIO(), io.StringIO()
    return Progress(live=False, errors=errors, output=output, **settings), errors, output


def test_plain_run_prints_a_line_a_logged_row(clock):
    progress, errors, output = _plain()
    progress.banner(["quickstart", "1 device"])
    with progress.phase("compiling") as phase:
        clock.now += 3.1
        phase.note("from cache")
    progress.start(600, 300)
    for step in range(301, 321):
        clock.now += 30.0 if step == 301 else 0.1
        progress.update(step, _ROW if step == 320 else {})
    progress.update(600, {"loss": 2.0})
    progress.finish(["final loss 2.0"])
    assert errors.getvalue().splitlines() == [
        "quickstart",
        "1 device",
        "compiling … 3.1 s (from cache)",
        "step 320/600  loss 4.712  12.1k tok/s  data wait 1 %  ETA 0:28",
        "step 600/600  loss 2.000",
        "loss █▁ 4.712 → 2.000",
    ]
    assert output.getvalue() == "final loss 2.0\n"


def test_slow_phase_says_so_at_its_start(monkeypatch):
    monkeypatch.setattr("jaxtrain.metrics.progress._SLOW_PHASE_SECONDS", 0.0)
    progress, errors, _ = _plain()
    with progress.phase("tracing"):
        while not errors.getvalue():
            pass
    assert errors.getvalue().splitlines()[0] == "tracing …"


def test_failed_phase_says_so(clock):
    progress, errors, _ = _plain()

    def read():
        with progress.phase("reading data"):
            clock.now += 0.5
            raise KeyError

    with pytest.raises(KeyError):
        read()
    assert errors.getvalue() == "reading data … failed after 0.50 s\n"


@pytest.mark.parametrize("live", [True, False], ids=["live", "plain"])
def test_other_processes_are_silent(live):
    errors, output = io.StringIO(), io.StringIO()
    with Progress(process_index=1, live=live, errors=errors, output=output) as progress:
        progress.banner(["x"])
        with progress.phase("compiling"):
            pass
        progress.start(2, 0)
        progress.update(1, _ROW)
        progress.message("x")
        progress.result("x")
        progress.finish(["x"])
    assert errors.getvalue() + output.getvalue() == ""


def test_live_view_draws_a_bar_and_leaves_markup_alone():
    errors, output = io.StringIO(), io.StringIO()
    with Progress(live=True, errors=errors, output=output) as progress:
        with progress.phase("compiling [red]"), progress.phase("inner"):
            pass
        progress.start(2, 0)
        progress.update(1, _ROW)
        with progress.phase("evaluating"):
            pass
        progress.message("a [bold] word")
        progress.update(2, {})
        progress.finish(["done"])
    shown = errors.getvalue()
    for text in ("compiling [red] … ", "evaluating … ", "a [bold] word", "2/2", "loss 4.712"):
        assert text in shown
    assert output.getvalue() == "done\n"


def test_prints_of_the_program_stay_on_standard_output(capsys):
    errors = io.StringIO()
    with Progress(live=True, errors=errors) as progress:
        progress.start(2, 0)
        print("for a file")
    assert capsys.readouterr().out == "for a file\n"
    assert "for a file" not in errors.getvalue()


@pytest.mark.parametrize(
    ("columns", "shown", "dropped"),
    [pytest.param("120", "data wait 1 %", "...", id="wide"), pytest.param("60", "loss 4.712", "tok/s", id="narrow")],
)
def test_narrow_terminal_drops_facts_before_the_count(monkeypatch, columns, shown, dropped):
    monkeypatch.setenv("COLUMNS", columns)
    errors = io.StringIO()
    with Progress(live=True, errors=errors) as progress:
        progress.start(600, 0)
        progress.update(600, _ROW)
    assert shown in errors.getvalue()
    assert "600/600" in errors.getvalue()
    assert dropped not in errors.getvalue()


@pytest.mark.parametrize(
    ("variables", "is_terminal", "live"),
    [
        pytest.param({}, True, True, id="terminal"),
        pytest.param({}, False, False, id="pipe"),
        pytest.param({"NO_COLOR": "1"}, True, False, id="no-color"),
        pytest.param({"CI": "true"}, True, False, id="ci"),
        pytest.param({"TERM": "dumb"}, True, False, id="dumb-terminal"),
    ],
)
def test_live_only_where_it_can_be_seen(monkeypatch, variables, is_terminal, live):
    for name in ("NO_COLOR", "CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    errors = io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    with Progress() as progress:
        progress.start(2, 0)
    assert ("\x1b[" in errors.getvalue()) == live


def test_output_that_is_not_unicode_gets_escapes():
    raw = io.BytesIO()
    progress, _, _ = _plain()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress = Progress(live=False, errors=stream, output=stream)
    progress.result("café")
    assert raw.getvalue() == b"caf\\xe9\n"


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        pytest.param([], None, id="no-step"),
        pytest.param([(11, 50.0)], None, id="first-step-may-compile"),
        pytest.param([(11, 50.0), (12, 52.0)], 2.0 * 88, id="from-the-second-step"),
        pytest.param([(20, 50.0), (30, 60.0)], 70.0, id="logged-rows-only"),
        pytest.param([(99, 0.0), (100, 1.0)], 0.0, id="at-the-end"),
    ],
)
def test_remaining_time(updates, expected):
    remaining = RemainingTime(100, 10)
    for step, now in updates:
        remaining.update(step, now)
    assert remaining.seconds() == expected


def test_trend_keeps_ends_and_stays_small():
    trend = Trend()
    for value in [9.0, math.nan, *(1.0 / n for n in range(1, 50_001))]:
        trend.add(value)
    assert trend.ends() == (9.0, 1 / 50_000)
    assert len(trend._values) <= 1024
    assert len(trend.sparkline()) == 40
    trend.add(math.nan)
    assert (trend.ends()[0], math.isnan(trend.ends()[1]), len(trend.sparkline())) == (9.0, True, 40)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({}, []),
        ({"examples_per_second": 950.0}, ["950 examples/s"]),
        ({"model_flops_utilization": 0.4123, "skipped_steps": 2}, ["MFU 41.2 %", "skipped 2"]),
        ({"eval_loss": 1.23456, "eval_accuracy": 0.5}, ["eval loss 1.235", "eval accuracy 0.5"]),
        ({"loss": float("nan"), "tokens_per_second": None}, ["loss nan"]),
        # The wait over the mean step, 6 / 12 s; a median step of 0.1 s is no part of it.
        (
            {"step": 6, "tokens": 600, "tokens_per_second": 50.0, "step_seconds": 0.1, "data_wait_seconds": 1.0},
            ["50 tok/s", "data wait 50 %"],
        ),
        ({"loss": 3.2e-4}, ["loss 0.00032"]),
        ({"loss": 8.4e35}, ["loss 8.4e+35"]),
    ],
)
def test_describe(row, parts):
    assert describe(row) == parts


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (format_duration, 0.0, "0.00 s"),
        (format_duration, 0.996, "1.0 s"),
        (format_duration, 59.94, "59.9 s"),
        (format_duration, 59.96, "1:00"),
        (format_duration, 3723, "1:02:03"),
        (format_duration, 86400 * 3 + 7500, "3 d 2:05"),
        (format_duration, None, "-"),
        (format_duration, float("inf"), "-"),
        (format_clock, 24.2, "0:24"),
        (format_clock, -1, "0:00"),
        (format_count, 0, "0"),
        (format_count, 999, "999"),
        (format_count, 999.6, "1.00k"),
        (format_count, 12_100, "12.1k"),
        (format_count, 124_439_808, "124M"),
        (format_count, 8_030_261_248, "8.03B"),
        (format_count, 1.56e13, "15.6T"),
        (format_count, 5e16, "50000T"),
        (format_count, -1500, "-1.50k"),
        (format_count, 0.5, "0.50"),
        (format_bytes, 512, "512 B"),
        (format_bytes, 1536 * 1024, "1.5 MiB"),
        (format_bytes, 71.2 * 2**30, "71.2 GiB"),
        (format_bytes, None, "-"),
        (sparkline, [], ""),
        (sparkline, [1.0, 1.0], "▁▁"),
        (sparkline, [3.0, math.nan, 1.0], "█▁"),
    ],
)
def test_numbers_as_text(function, value, text):
    assert function(value) == text
