"""The report: self-contained, escaped, small whatever the run logged, and tolerant of what is missing."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxtrain.metrics.report.curves import MAX_POINTS, piece_starts, read_series, smoothed, thin
from jaxtrain.metrics.report.page import write_report
from jaxtrain.metrics.report.script import SCRIPT
from jaxtrain.runtime.files import write_json_atomic

_RUN = {
    "name": "quick <b>start</b>",
    "status": "done",
    "created": "2026-01-02T03:04:05+00:00",
    "finished": "2026-01-02T03:06:05+00:00",
    "config": {"task": "language_modeling", "seed": 0, "model": {"kind": "transformer", "rope": {"factor": 8.0}}},
    "versions": {"jax": "0.10.2", "absent": None},
    "devices": {"platform": "gpu", "kind": "NVIDIA H200", "count": 8, "process_count": 1},
    "mesh": {"data": 8},
    "git_commit": "c0ffee",
    "git_dirty": True,
    "model": {"name": "transformer", "num_parameters": 124439808},
    "data": {"description": ["first line", "second <line>"], "fingerprint": "f00d"},
    "final": {"loss": 1.25, "eval_loss": 1.5},
}


def _row(step, **more):
    row = {
        "step": step, "loss": 10.0 / step, "grad_norm": 100.0 / step**2, "learning_rate": 1e-3, "tokens": step * 64,
        "tokens_per_second": 12_100.0, "step_seconds": 0.1, "data_wait_seconds": 0.01,
        "model_flops_utilization": 0.41, "device_memory_bytes": 2**30, "skipped_steps": 0,
    }  # fmt: skip
    return json.dumps(row | more) + "\n"


def _write(run_dir, *, run=_RUN, metrics=None, sample=None):
    if run is not None:
        write_json_atomic(run_dir / "run.json", run)
    if metrics is not None:
        (run_dir / "metrics.jsonl").write_text(metrics)
    if sample is not None:
        (run_dir / "sample.txt").write_text(sample)
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return path.read_text()


class _Page(HTMLParser):
    """Text, tags and ids; fails on tags that do not match."""

    _VOID = frozenset({"meta", "br", "wbr", "img", "path", "use", "rect", "circle"})

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.words, self.sources = [], [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "wbr":
            self.words.append(tag)
        for name, value in attrs:
            if name == "src":
                self.sources.append(value)
            if name == "id":
                self.ids.append(value)
            self.references += re.findall(r"url\(#([^)]*)\)", value or "")
            if name.endswith("href"):
                self.references.append(value.removeprefix("#"))

    def handle_endtag(self, tag):
        if tag not in self._VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        # A line may break at a wbr, and a reader sees nothing there.
        return " ".join(" ".join(self.words).replace(" wbr ", "").split())


_METRICS = "".join(_row(step) for step in range(1, 41)) + '{"step": 40, "eval_loss": 1.5}\n'


def test_page_is_self_contained_and_its_ids_do_not_collide(tmp_path):
    html = _write(tmp_path, metrics=_METRICS)
    page = _Page(html)
    assert "://" not in html
    assert "@import" not in html
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    # The page's own script, which holds nothing of the run; without it titles give the values.
    assert page.tags.count("script") == 1
    assert f"<script>{SCRIPT}</script>" in html
    assert "step 40: train 0.25, held-out 1.5" in page.text
    assert page.tags.count("svg") == 5
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
    # Every colour is the page's: one picture serves light and dark.
    assert not re.search(r"#[0-9a-f]{6}", "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL)))


def test_headline_holds_what_matters(tmp_path):
    text = _Page(_write(tmp_path, metrics=_METRICS)).text
    for words in (
        "1.25 final loss", "1.5 held-out loss", "4.482 held-out perplexity", "12.1k tokens/s",
        "41.0 % model FLOPs utilization", "2:00 wall time", "1.0 GiB peak device memory", "40 steps",
        "124,439,808 parameters", "8 x NVIDIA H200", "rope.factor 8.0", "c0ffee (with changes)", "jax 0.10.2",
        "nats per token", "tokens/s", "milliseconds",
    ):  # fmt: skip
        assert words in text


def test_everything_is_escaped(tmp_path):
    run = _RUN | {
        "status": "<script>1</script>",
        "config": {"<i>": "<script>2</script>", "model": {"x": ["<script>3</script>"]}},
        "versions": {"<script>4</script>": "5"},
    }
    html = _write(tmp_path, run=run, metrics=_METRICS, sample="</pre><script>6</script> & \x00\x1b[31m é")
    page = _Page(html.replace(f"<script>{SCRIPT}</script>", "").replace("<b>from an earlier end of this run</b>", ""))
    assert not {"script", "b", "i"} & set(page.tags)
    assert "</pre><script>6</script> & \ufffd\ufffd[31m é" in page.text
    assert "quick <b>start</b>" in page.text


@pytest.mark.parametrize(
    ("run", "metrics"),
    [
        pytest.param(None, None, id="empty-directory"),
        pytest.param(_RUN, _row(1), id="one-row"),
        pytest.param(_RUN, _row(1, loss=None, grad_norm=None), id="diverged-at-once"),
        pytest.param(_RUN, _row(1) + _row(2)[:25], id="torn-last-line"),
        pytest.param(_RUN, _row(1, loss=1e30) + _row(2, loss=-1e30), id="huge"),
    ],
)
def test_tolerates_what_is_missing(tmp_path, run, metrics):
    _Page(_write(tmp_path, run=run, metrics=metrics))


def test_long_runs_give_a_page_below_200_kb(tmp_path):
    """Six standard pictures, the six of own metrics that are drawn at most, and a sample."""
    rng = np.random.default_rng(0)

    def row(step):
        noise = rng.random(10)
        own = {f"own_{name}": float(value) for name, value in zip("abcdefgh", noise, strict=False)}
        held_out = {"eval_loss": 10.0 / step + 1, "eval_accuracy": 0.5} if step % 50 == 0 else {}
        return _row(step, loss=10 / step + noise[8], grad_norm=noise[9], accuracy=noise[0], **own, **held_out)

    html = _write(tmp_path, metrics="".join(row(step) for step in range(1, 5001)), sample="word " * 100)
    page = _Page(html)
    assert page.tags.count("figure") == 12
    assert "Bands show the smallest and largest value of neighbouring rows." in page.text
    assert "Without a picture: own_g, own_h." in page.text
    assert len(html.encode()) < 200_000


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1, 12_345])
def test_thinning_keeps_mean_extremes_and_order(count):
    steps, values = np.arange(count, dtype=float), np.random.default_rng(0).normal(size=count)
    curve = thin(steps, values)
    assert len(curve.steps) == min(count, MAX_POINTS)
    assert curve.is_thinned == (count > MAX_POINTS)
    assert (np.diff(curve.steps) > 0).all()
    assert curve.low.min() == values.min()
    assert curve.high.max() == values.max()
    # Bins differ in size by one row at most, so that means of means stray from the mean by far less than a row.
    assert curve.values.mean() == pytest.approx(values.mean(), abs=1e-2)


def test_series_are_ordered_and_leave_out_what_is_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(_row(2, loss=None) + _row(1) + '{"step": 3, "sample": "text", "loss": 4.0}\n')
    series, gaps = read_series(path)
    assert series["loss"][0].tolist() == [1, 3]
    assert "sample" not in series
    assert gaps["loss"].tolist() == [2]


def test_no_line_crosses_a_gap_and_no_mean_reaches_over_it(tmp_path):
    """Values fall from 3 to 2 before the gap, and from 1 to 0 behind it: all means stay within either."""
    count, third = 3000, 1000
    values = [*np.linspace(3, 2, third), *[None] * third, *np.linspace(1, 0, count - 2 * third)]
    html = _write(tmp_path, metrics="".join(_row(step + 1, loss=loss) for step, loss in enumerate(values)))
    assert "Where a line is interrupted, its values were not finite, or not known." in _Page(html).text
    (steps, values), gaps = (found["loss"] for found in read_series(tmp_path / "metrics.jsonl"))
    starts = piece_starts(steps, gaps)
    assert steps[starts].tolist() == [2 * third + 1]
    even = smoothed(values, starts)
    assert even is not None
    np.testing.assert_allclose(even, values, atol=1e-12)
    curve = thin(steps, even, starts=starts, max_points=50)
    assert [curve.low[: curve.starts[0]].min(), curve.high[curve.starts[0] :].max()] == pytest.approx([2, 1])
    # The strong line of the training loss and, of a thinned curve, its band: a piece on either side.
    loss = re.findall(r'<path d="([^"]*)"', html.partition('aria-label="Loss over steps"')[2].partition("</svg>")[0])
    lines = [path for path in loss if path.count("M") == 2 and "h0" not in path and len(path) > 100]
    assert len(lines) == 2
