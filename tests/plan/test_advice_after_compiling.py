"""Advice once a compiler has spoken: none where it says that a step fits, and by its figure where it does not."""

import dataclasses
import re

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.search import make
from jaxtrain.plan.search.estimate import Estimate


def compiled(monkeypatch, overrides, times) -> tuple[Estimate, Estimate]:
    """A plan before and after a compiler that finds so many times its peak."""
    config = load_config("llama3_8b", overrides=overrides).config
    before = make.analytic_plan(config, parse_targets("h100x8")[0])
    answer = {"state_bytes": 1, "peak_bytes": round(times * before.memory.total_bytes), "temporary_bytes": 1}
    monkeypatch.setattr(make, "_compile", lambda _: {**answer, "capacity_bytes": None, "compile_seconds": 1.0})
    return before, make.with_compiler(before, lambda _: None)


def test_what_the_compiler_finds_to_fit_needs_no_advice(monkeypatch):
    before, after = compiled(monkeypatch, ["remat.policy=none"], 0.2)
    assert before.advice
    assert after.fits
    assert after.advice == ()


def test_advice_leaves_room_for_what_the_compiler_found_more(monkeypatch):
    before, after = compiled(monkeypatch, ["remat.policy=dots"], 3.0)
    assert before.fits
    assert before.advice == ()
    assert after.fits is False
    usable = after.memory.usable_bytes
    assert usable is not None
    sizes = [float(found[1]) * 2**30 for line in after.advice if (found := re.search(r": ([\d.]+) GiB", line))]
    assert sizes
    assert all(3 * size <= usable + 3 * 2**27 for size in sizes)
    assert dataclasses.replace(after, exact=None).fits
