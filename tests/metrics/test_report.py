"""The report of a run: self-contained, escaped, small whatever was logged, tolerant of what is missing; its words."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxtrain.metrics.report.page import write_report
from jaxtrain.metrics.throughput import PARTS, TimeSpent
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
    "final": {"loss": 1.25, "eval_loss": 1.5, "wall_seconds": 120.0},
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
    """Text, tags and attributes; fails on tags that do not match."""

    _VOID = frozenset({"meta", "br", "wbr", "img", "path", "rect", "circle"})

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "wbr":
            self.words.append(tag)

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


def test_page_is_self_contained_and_its_headline_holds_what_matters(tmp_path):
    html = _write(tmp_path, metrics=_METRICS)
    page = _Page(html)
    assert "://" not in html
    assert "@import" not in html
    assert not {"link", "img", "iframe", "object", "script"} & set(page.tags)
    assert not {"id", "href", "src"} & set(page.attributes)
    assert page.tags.count("svg") == 5
    # Every colour is the page's: one picture serves light and dark.
    assert not re.search(r"#[0-9a-f]{6}", "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL)))
    for words in (
        "1.25 final loss", "1.5 held-out loss", "4.482 held-out perplexity", "12.1k tokens/s",
        "41.0 % model FLOPs utilization", "2:00 wall time", "1.0 GiB peak device memory", "40 steps",
        "124,439,808 parameters", "8 x NVIDIA H200", "rope.factor 8.0", "c0ffee (with changes)", "jax 0.10.2",
        "nats per token", "tokens/s", "milliseconds", "step 40: train 0.25, held-out 1.5",
    ):  # fmt: skip
        assert words in page.text


def test_everything_is_escaped(tmp_path):
    run = _RUN | {
        "status": "<script>1</script>",
        "config": {"<i>": "<script>2</script>", "model": {"x": ["<script>3</script>"]}},
        "versions": {"<script>4</script>": "5"},
    }
    html = _write(tmp_path, run=run, metrics=_METRICS, sample="</pre><script>6</script> & \x00\x1b[31m é")
    page = _Page(html.replace("<b>an earlier end of this run</b>", ""))
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
    assert "Without a picture: own_g, own_h." in page.text
    assert len(html.encode()) < 200_000


def _words(run_dir, run, train=(), held_out=(), *, sample=None, extra=()):
    """The page as text: tags, style and pictures taken out."""
    rows = [{"step": step, "loss": loss} for step, loss in train]
    rows += [{"step": step, "eval_loss": loss} for step, loss in held_out]
    rows += list(extra)
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    page = _write(run_dir, run={"name": "run", "status": "done", **run}, metrics=metrics, sample=sample)
    page = re.sub(r"<(style|svg).*?</\1>", "", page, flags=re.DOTALL).replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


_LANGUAGE = {"task": "language_modeling", "data": {"vocab_size": 2048}}
_FALLING = [(step, 5.0 - step / 200) for step in range(100, 801, 100)]


# What run.json says, training and held-out losses, and a sentence of the page.
_SAID = {
    "overfits": (
        _LANGUAGE, _FALLING, [(200, 4.0), (600, 3.83), (800, 3.94)],
        "best at step 600 (3.83) and has risen by 0.11 since: the model may overfit",
    ),
    "still falls": (
        _LANGUAGE, _FALLING, [(400, 4.0), (800, 3.8)],
        "best at step 800 (3.8), its last evaluation: more steps may lower it further",
    ),
    "a guess": (_LANGUAGE, [(1, 7.7)], [], "Training loss (7.7) is no better than a uniform guess over 2,048 tokens"),
    "running": ({"status": "running"}, [(8, 2.0)], [], "still trains, or was killed. Its last row is of step 8 of 20"),
    "diverged": ({"status": "diverged"}, [(8, 2.0)], [], "The run diverged at step 8 of 20: gradients were not finite"),
    "waiting": (
        {"seconds": {"steps": 6.0, "waiting for data": 4.0}}, [(8, 2.0)], [],
        "40 % of the time of the steps was spent waiting",
    ),
    "regression": (
        {"task": "regression", "data": {"reading": {"target_deviation": [1.0, 3.0]}}}, [(8, 2.0)], [],
        "Training loss is 2; the mean of the targets gives 5.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "train", "held_out", "words"), _SAID.values(), ids=_SAID)
def test_what_the_numbers_mean_is_said(tmp_path, run, train, held_out, words):
    assert words in _words(tmp_path, {"config": {"train": {"steps": 20}}, **run}, train, held_out)


def test_a_loss_that_is_not_finite_is_not_the_one_before(tmp_path):
    train = [(step, 1.5 if step <= 50 else None) for step in range(10, 101, 10)]
    text = _words(tmp_path, {"status": "running"}, train, [(50, 1.5), (100, None)])
    assert "not finite final loss" in text
    assert "not finite held-out loss" in text
    assert "Training loss is not finite" in text
    assert "Held-out loss is not finite; it was best at step 50 (1.5)" in text


def test_the_prompt_is_told_apart_and_the_sample_has_its_step(tmp_path):
    run = {"config": {"evaluation": {"sample_prompt": "Once"}, "train": {"steps": 10}}}
    extra = [{"step": 10, "sample": "Once more"}]
    text = _words(tmp_path, run, [(10, 1.0)], sample="Once more", extra=extra)
    assert "after step 10 Once more" in text
    assert '<b class="prompt">Once</b><span class="sample"> more</span>' in (tmp_path / "report.html").read_text()
    text = _words(tmp_path, run | {"status": "preempted"}, [(10, 1.0), (15, 1.0)], sample="Once more", extra=extra)
    assert "after step 10, an earlier end of this run , which has since gone on to step 15" in text


def test_where_the_time_went_adds_up_over_resumes(tmp_path):
    first, second = TimeSpent(), TimeSpent()
    first.add("steps", 3.0)
    second.add("steps", 2.0)
    second.after(first.seconds())
    # Rounded to milliseconds in each of the two.
    assert second.seconds() == pytest.approx({**dict.fromkeys([*PARTS, "other"], 0.0), "steps": 5.0}, abs=2e-3)
    run = {"seconds": {"steps": 45.0, "compiling": 15.0}, "resumed_after": [40]}
    text = _words(tmp_path, run, [(80, 1.0)])
    assert "1:00 in all, over 2 starts of the run. steps: 45.0 s (75.0 %) compiling: 15.0 s (25.0 %)" in text
    assert "resumed after step 40" in text


def test_settings_that_differ_come_first_and_the_rest_is_folded(tmp_path):
    config = {
        "task": "classification",
        "model": {"kind": "mlp", "hidden_dims": [8, 8]},
        "data": {"kind": "digits"},
        "optimizer": {"kind": "adamw", "learning_rate": 0.002},
    }
    text = _words(tmp_path, {"config": config}, [(1, 2.0)])
    changed, _, others = text[text.index("Settings that differ") :].partition("other")
    assert "optimizer.learning_rate 0.002 0.001" in changed
    assert "model.hidden_dims [8, 8] [256, 256]" in changed
    assert "data.kind digits" in changed
    assert "learning_rate" not in others.partition("Versions")[0]
