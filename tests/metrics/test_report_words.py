"""What the report says in words and numbers of its own: overfitting, the uniform guess, time, settings, parameters."""

import json
import math
import re

import numpy as np
import pytest

from jaxtrain.metrics.report.axes import make_scale
from jaxtrain.metrics.report.curves import smoothed
from jaxtrain.metrics.report.page import write_report
from jaxtrain.metrics.time_spent import PARTS, TimeSpent
from jaxtrain.runtime.files import write_json_atomic

_LANGUAGE = {"task": "language_modeling", "data": {"vocab_size": 2048}}


def _text(run_dir, run, train=(), held_out=(), *, sample=None, extra=()):
    """The page as text: tags, style and script taken out."""
    rows = [{"step": step, "loss": loss} for step, loss in train]
    rows += [{"step": step, "eval_loss": loss} for step, loss in held_out]
    rows += list(extra)
    write_json_atomic(run_dir / "run.json", {"name": "run", "status": "done", **run})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if sample is not None:
        (run_dir / "sample.txt").write_text(sample)
    page = write_report(run_dir).read_text()
    page = re.sub(r"<(style|script|svg).*?</\1>", "", page, flags=re.DOTALL).replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


_FALLING = [(step, 5.0 - step / 200) for step in range(100, 801, 100)]


@pytest.mark.parametrize(
    ("train", "held_out", "words"),
    [
        pytest.param(
            _FALLING, [(200, 4.0), (600, 3.83), (800, 3.94)],
            "best at step 600 (3.83) and has risen by 0.11 since; training loss still falls: the model overfits",
            id="overfits",
        ),
        pytest.param(
            _FALLING, [(200, 4.0), (600, 3.830), (800, 3.835)],
            "best at step 600 (3.83) and has stayed there since (3.835 at step 800)", id="stays-at-its-best",
        ),
        pytest.param(
            _FALLING, [(400, 4.0), (800, 3.8)],
            "best at step 800 (3.8), its last evaluation: more steps may lower it further", id="still-falls",
        ),
        pytest.param(_FALLING, [], "No held-out rows were evaluated", id="no-held-out-rows"),
        pytest.param(
            [(1, 7.7)], [], "Training loss (7.7) is no better than a uniform guess over 2,048 tokens (7.625)",
            id="no-better-than-a-guess",
        ),
    ],
)  # fmt: skip
def test_curves_are_said_in_words(tmp_path, train, held_out, words):
    assert words in _text(tmp_path, _LANGUAGE, train, held_out)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"status": "running"}, "has not ended: it still trains, or was killed. The last row is of step 8 of 20"),
        ({"status": "diverged"}, "The run diverged: its gradients were not finite"),
        ({"final": {"skipped_steps": 1}}, "1 step was skipped, because gradients were not finite"),
        ({"seconds": {"steps": 6.0, "waiting for data": 4.0}}, "40 % of the time of the steps was spent waiting"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_how_a_run_ended_is_said(tmp_path, run, words):
    assert words in _text(tmp_path, {"config": {"train": {"steps": 20}}, **run}, [(8, 2.0)])


def test_a_baseline_exists_only_where_a_guess_is_uniform(tmp_path):
    text = _text(tmp_path, {"task": "regression", "data": {"num_outputs": 3}}, [(1, 2.0)])
    assert "uniform guess" not in text


@pytest.mark.parametrize(
    ("steps", "samples", "status", "words", "absent"),
    [
        pytest.param([10], [(10, "Once more")], "done", "after step 10", "earlier end", id="of-this-end"),
        pytest.param(
            [10, 15], [(10, "Once more")], "preempted",
            "after step 10, an earlier end of this run , which has since gone on to step 15", "?", id="made-longer",
        ),
    ],
)  # fmt: skip
def test_the_prompt_is_told_apart_and_the_sample_has_its_step(tmp_path, steps, samples, status, words, absent):
    run = {"status": status, "config": {"evaluation": {"sample_prompt": "Once"}, "train": {"steps": 10}}}
    extra = [{"step": step, "sample": text} for step, text in samples]
    text = _text(tmp_path, run, [(step, 1.0) for step in steps], sample="Once more", extra=extra)
    shown = text[text.index("Sample") : text.index("Curves")]
    assert words in shown
    assert absent not in shown
    assert '<b class="prompt">Once</b><span class="sample"> more</span>' in (tmp_path / "report.html").read_text()


def test_where_the_time_went_adds_up_over_resumes(tmp_path):
    first = TimeSpent()
    first.add("steps", 3.0)
    with first.measure("saving"):
        pass
    second = TimeSpent()
    second.add("steps", 2.0)
    second.after(first.seconds())
    seconds = second.seconds()
    assert set(seconds) == {*PARTS, "other"}
    # Rounded to milliseconds in each of the two.
    assert seconds["steps"] == pytest.approx(5.0, abs=2e-3)
    run = {"seconds": {"steps": 45.0, "compiling": 15.0}, "resumed_after": [40]}
    text = _text(tmp_path, run, [(80, 1.0)])
    assert "1:00 in all, over 2 starts of the run. steps: 45.0 s (75.0 %) compiling: 15.0 s (25.0 %)" in text
    assert "resumed after step 40" in text


def test_settings_that_differ_come_first_and_the_rest_is_folded(tmp_path):
    config = {
        "task": "classification",
        "model": {"kind": "mlp", "hidden_dims": [8, 8]},
        "data": {"kind": "digits"},
        "optimizer": {"kind": "adamw", "learning_rate": 0.002},
    }
    text = _text(tmp_path, {"config": config}, [(1, 2.0)])
    changed, _, others = text[text.index("Settings that differ") :].partition("other")
    assert "optimizer.learning_rate 0.002 0.001" in changed
    assert "model.hidden_dims [8, 8] [256, 256]" in changed
    assert "data.kind digits" in changed
    assert "learning_rate" not in others.partition("Versions")[0]


def test_parameters_have_shape_share_and_sharding(tmp_path):
    found = {"head/kernel": "float32[8,10] fsdp,-", "head/bias": "float32[10]", "odd": "?"}
    text = _text(tmp_path, {"parameters": found, "mesh": {"data": 2, "fsdp": 4, "pipe": 1}}, [(1, 2.0)])
    assert "90 numbers (90) in 2 arrays. Mesh: data 2, fsdp 4." in text
    assert "head/kernel 8 x 10 float32 80 88.9 % fsdp, -" in text
    assert "head/bias 10 float32 10 11.1 % replicated" in text
    assert "<details><summary>head" not in (tmp_path / "report.html").read_text()


def test_many_parameters_are_folded_per_group_and_the_page_stays_small(tmp_path):
    found = {f"blocks_{i // 20}/layer_{i}/kernel": "float32[160,448] fsdp,-" for i in range(2000)}
    text = _text(tmp_path, {"parameters": found}, [(1, 2.0)])
    assert "blocks_0: 1,433,600 (1.0 %) in 20 arrays" in text
    assert "and 20 more" in text
    # 400 rows of about 180 bytes, 100 groups, the style and the script.
    assert len((tmp_path / "report.html").read_text()) < 200_000


@pytest.mark.parametrize("count", [23, 1000])
def test_smoothing_does_not_move_a_straight_line(count):
    values = np.linspace(5.0, 3.0, count)
    even = smoothed(values)
    assert (even is None) == (count < 24)
    if even is not None:
        # Sums over up to 1,000 values of order 1, in float64.
        np.testing.assert_allclose(even, values, rtol=1e-12)


def test_a_run_that_was_killed_with_no_finite_loss_does_not_show_the_one_before(tmp_path):
    train = [(step, 1.5 if step <= 50 else None) for step in range(10, 101, 10)]
    text = _text(tmp_path, {"status": "running"}, train, [(50, 1.5), (100, None)])
    assert "not finite final loss" in text
    assert "not finite held-out loss" in text
    assert "Held-out loss was best" not in text
    assert "Training loss is not finite; it last was at step 50 (1.5)." in text
    assert "Held-out loss is not finite; it last was at step 50 (1.5)" in text


@pytest.mark.parametrize(
    ("low", "high", "options"),
    [
        (0.0, 400.0, {"is_whole": True}),
        (0.0, 0.0, {}),
        (-1e30, 1e30, {}),
        (1e-9, 1e9, {"may_be_log": True}),
        (12_345.0, 12_349.0, {}),
    ],
)
def test_axes_hold_their_values_and_have_few_ticks(low, high, options):
    scale = make_scale(low, high, **options)
    shares = scale.share(np.array([low, high]))
    assert np.isfinite(shares).all()
    assert (shares >= -1e-9).all()
    assert (shares <= 1 + 1e-9).all()
    assert 1 <= len(scale.ticks) <= 8
    assert all(math.isfinite(value) for value, _ in scale.ticks)
    assert len({label for _, label in scale.ticks}) == len(scale.ticks)
    assert not any("+" in label for _, label in scale.ticks)  # too wide for the room that a letter has
    assert max(len(label) for _, label in scale.ticks) < 10


def test_a_regression_is_held_against_the_mean_of_its_targets(tmp_path):
    reading = {"target_deviation": [1.0, 3.0]}
    run = {"status": "done", "task": "regression", "data": {"reading": reading}}
    assert "Training loss is 2; the mean of the targets gives 5." in _text(tmp_path, run, [(1, 2.0)])
    assert "Training loss (6) is no better than the mean of the targets (5)" in _text(tmp_path, run, [(1, 6.0)])
