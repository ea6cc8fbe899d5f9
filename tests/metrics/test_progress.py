"""What people see: plain lines, the live view, a notebook, numbers as text."""

import io
import sys
from types import SimpleNamespace

import pytest

from jaxtrain.metrics.format import format_bytes, format_clock, format_count, format_duration
from jaxtrain.metrics.progress import Progress, describe

_ROW = {"loss": 4.7119, "step": 1, "tokens": 1210, "tokens_per_second": 12_100.0, "data_wait_seconds": 0.001}


@pytest.fixture
def clock(monkeypatch):
    """A steady clock that moves when told to."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("jaxtrain.metrics.progress.time.monotonic", lambda: clock.now)
    return clock


def test_plain_run_prints_a_line_a_logged_row(clock):
    errors, output = io.StringIO(), io.StringIO()
    progress = Progress(live=False, errors=errors, output=output)
    progress.message("1 device")
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
        "1 device",
        "compiling … 3.1 s (from cache)",
        "step 320/600  loss 4.712  12.1k tok/s  data wait 1 %  ETA 0:28",
        "step 600/600  loss 2.000",
    ]
    assert output.getvalue() == "final loss 2.0\n"


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


@pytest.mark.parametrize(
    ("variables", "is_terminal", "live"),
    [
        pytest.param({}, True, True, id="terminal"),
        pytest.param({}, False, False, id="pipe"),
        pytest.param({"NO_COLOR": "1"}, True, False, id="no-color"),
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


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"model_flops_utilization": 0.4123, "skipped_steps": 2}, ["MFU 41.2 %", "skipped 2"]),
        ({"loss": float("nan"), "tokens_per_second": None}, ["loss nan"]),
        # The wait over the mean step, 6 / 12 s; a median step of 0.1 s is no part of it.
        (
            {"step": 6, "tokens": 600, "tokens_per_second": 50.0, "step_seconds": 0.1, "data_wait_seconds": 1.0},
            ["50 tok/s", "data wait 50 %"],
        ),
        ({"loss": 8.4e35}, ["loss 8.4e+35"]),
    ],
)
def test_describe(row, parts):
    assert describe(row) == parts


def test_numbers_as_text():
    durations = {0.996: "1.0 s", 59.96: "1:00", 3723: "1:02:03", 86400 * 3 + 7500: "3 d 2:05", None: "-"}
    assert {value: format_duration(value) for value in durations} == durations
    counts = {0: "0", 999.6: "1.00k", 12_100: "12.1k", 8_030_261_248: "8.03B", -1500: "-1.50k", 0.5: "0.50"}
    assert {value: format_count(value) for value in counts} == counts
    assert (format_clock(24.2), format_bytes(71.2 * 2**30), format_bytes(None)) == ("0:24", "71.2 GiB", "-")


class Page:
    """Stands in for a notebook: what `display` was called with, and what each output holds last."""

    def __init__(self):
        self.outputs, self.updates = [], 0

    def display(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(content)
        return SimpleNamespace(update=self.update)

    def update(self, content, *, raw):
        assert raw
        self.outputs[-1] = content
        self.updates += 1


@pytest.fixture
def page(monkeypatch):
    """This process as the kernel of a notebook."""
    shell = type("ZMQInteractiveShell", (), {})()
    page = Page()
    display = SimpleNamespace(display=page.display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return page


def train(progress, steps=40):
    with progress.phase("reading <data>"):
        pass
    progress.start(steps, 0)
    for step in range(1, steps + 1):
        progress.update(step, {"loss": 1 / step} if step % 10 == 0 else {})
    progress.message("step 40: eval loss 0.5")
    progress.finish(["done: step 40"])


def test_in_a_notebook_one_output_is_updated(page, capsys):
    with Progress() as progress:
        train(progress)
    (content,) = page.outputs
    assert '<progress value="40" max="40"' in content["text/html"]
    assert "reading &lt;data&gt; …" in content["text/html"]
    assert content["text/plain"].splitlines()[-1].startswith("40/40  loss 0.025")
    # Faster than a few updates per second nobody can read, and each passes through a socket.
    assert page.updates < 15
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[-1] == "done: step 40"
