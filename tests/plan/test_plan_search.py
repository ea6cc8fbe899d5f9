"""The search over layouts, the largest batch, advice for what does not fit, `parallel: auto`; a plan for everybody."""

import itertools
import re
from pathlib import Path

import jax
import pytest

import jaxtrain
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.compile import sharded_bytes
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import catalogue
from jaxtrain.plan.plans import advise, fitted_plan
from jaxtrain.plan.search import VARIED, chosen, describe_layout, largest_batch, layouts, search, why_not
from jaxtrain.plan.show import answer_lines
from jaxtrain.plan.step import with_degrees
from jaxtrain.plan.targets import nominal_cpu, parse_targets, target_of
from jaxtrain.plan.workload import describe_workload
from jaxtrain.train.build import build_step

H100X8 = target_of(catalogue()["h100"], 8)
SMALL = (
    *("data.tokenizer.kind=byte", "train.global_batch_size=32"),
    *("model.num_layers=4", "model.embed_dim=32", "model.num_heads=4", "model.mlp_dim=64"),
)


def config_of(name, *overrides):
    return load_config(name, overrides=overrides, weights=False).config


def test_a_search_ranks_what_fits_the_fastest_first():
    """The search that `jaxtrain plan llama3_8b --on h100x8 --search` makes: of 200 layouts and more."""
    config = config_of("llama3_8b")
    found = search(config, H100X8)
    assert analyse(next(layouts(config, 8, VARIED)), H100X8).memory == analyse(config, H100X8).memory  # as it is
    candidates = {candidate.model_dump_json() for candidate in layouts(config, 8, VARIED)}
    assert found.tried == len(candidates) >= 200
    assert found.ranked
    assert found.too_large
    assert all(one.fits for one in found.ranked)
    assert not any(one.fits for one in found.too_large)
    seconds = [one.time.seconds for one in found.ranked]
    assert seconds == sorted(seconds)
    sizes = [one.memory.total_bytes for one in found.too_large]
    assert sizes == sorted(sizes)
    for one in (*found.ranked, *found.too_large):
        assert one.config.train.global_batch_size == 64
        assert one.config.optimizer == config.optimizer
    memory, *refused = why_not(found)
    assert memory.startswith(f"{len(found.too_large)} layouts need more memory than ")
    assert describe_layout(found.too_large[0].config) in memory
    assert sum(int(line.split()[0]) for line in refused) == len(found.refused)
    assert all(line.partition(" refused: ")[2] for line in refused)


@pytest.mark.long
def test_a_layout_is_refused_by_the_planner_where_the_trainer_refuses_it():
    """Every mesh and schedule on 4 devices: the step can be built just where the plan says so, with its bytes."""
    config = config_of("quickstart", *SMALL, "model.max_sequence_length=4096", "model.num_heads=2")
    kinds = {"taken": 0, "refused": 0}
    for candidate in layouts(config, 4, ("mesh", "schedule")):
        try:
            predicted = analyse(candidate, target_of(catalogue()["h100"], 4)).memory.state_bytes
        except ConfigError:
            predicted = None
        workload = describe_workload(candidate)
        sizes = dict(input_shape=workload.input_shape, vocab_size=workload.vocab_size)
        try:
            step = build_step(with_degrees(candidate, 4), **sizes, devices=jax.devices()[:4])
        except ConfigError:
            assert predicted is None, describe_layout(candidate)
            kinds["refused"] += 1
        else:
            assert predicted is not None, describe_layout(candidate)
            assert predicted == pytest.approx(sharded_bytes(step.abstract_state), rel=0.01), describe_layout(candidate)
            kinds["taken"] += 1
    assert min(kinds.values()) > 0


# id: (overrides, rows that a layout takes at the least, the most rows that fit, the answer)
BATCHES = {
    "any": (["parallel.fsdp=8"], 8, 95, 88),
    "none": (["parallel.fsdp=8"], 8, 7, None),
    "accumulation": (["parallel.data=4", "parallel.tensor=2", "train.accumulation_steps=4"], 16, 1000, 992),
    # The trainer takes a pipeline's microbatches from accumulation where none are set.
    "pipeline with accumulation": (["parallel.pipe=2", "parallel.data=4", "train.accumulation_steps=8"], 32, 70, 64),
}


@pytest.mark.parametrize(("overrides", "least", "most", "answer"), BATCHES.values(), ids=BATCHES)
def test_largest_batch(overrides, least, most, answer):
    asked = []

    def fits(config):
        rows = config.train.global_batch_size
        asked.append(rows)
        # What is asked can be laid out: no ConfigError.
        analyse(config, H100X8)
        return rows <= most

    config = with_degrees(config_of("quickstart", *SMALL, *overrides), 8)
    assert largest_batch(config, fits) == answer
    assert asked[0] == least
    assert all(rows % least == 0 for rows in asked)
    # No question twice, and no more than doubling and bisecting need: each is a compile.
    assert len(asked) == len(set(asked)) <= 2 + 2 * max(1, most // least).bit_length()


# id: (config, target, overrides, what the first line begins with)
DO_NOT_FIT = {
    "no remat": ("llama3_8b", "h100x8", ["remat.policy=none"], "remat.policy=dots: "),
    "two changes": (
        *("llama3_8b", "a100-40x8", ["remat.policy=dots", "train.accumulation_steps=1"]),
        "remat.policy=full and train.accumulation_steps=2: ",
    ),
    "adapters": ("llama3.1_8b_lora", "t4", [], "finetune.base="),
    # A microbatch keeps its rows on each device: 8 rows in 8 microbatches of one are 2 of 4.
    "more devices": (
        *("llama3_8b", "h100"),
        ["parallel.fsdp=1", "train.global_batch_size=8", "model.size=llama2_13b", "model.max_sequence_length=8192"],
        "h100x4 with parallel.fsdp=4 and train.accumulation_steps=2: ",
    ),
}


def applied(line, name, overrides, target):
    """The plan of what a user types who follows a line of advice."""
    changes = re.sub(r" \([^)]*\)", "", line).partition(": ")[0]
    on, given, changes = changes.rpartition(" with ")
    words = changes.split(" and ")
    assert all(re.fullmatch(r"[a-z0-9_.]+=[a-z0-9_]+", word) for word in words), line
    return analyse(config_of(name, *overrides, *words), parse_targets(on if given else target)[0])


@pytest.mark.parametrize(("name", "target", "overrides", "expected"), DO_NOT_FIT.values(), ids=DO_NOT_FIT)
def test_advice_fits_when_it_is_followed(name, target, overrides, expected):
    estimate = analyse(config_of(name, *overrides), parse_targets(target)[0])
    assert estimate.fits is False
    lines = advise(estimate)
    assert 1 <= len(lines) <= 4
    # Neither a line twice, nor the same two changes in both orders.
    assert len({frozenset(line.partition(": ")[0].split(" and ")) for line in lines}) == len(lines)
    assert lines[0].startswith(expected)
    for line in lines:
        after = applied(line, name, overrides, target)
        assert after.fits, line
        assert f": {after.memory.total_bytes / 2**30:.1f} GiB" in line


def test_auto_and_a_degree_are_a_mistake():
    with pytest.raises(ConfigError, match=r"auto chooses every degree, but parallel\.fsdp is set; leave one"):
        chosen(config_of("quickstart", "parallel=auto", "parallel.fsdp=2"), H100X8)


def test_auto_picks_the_fastest_that_fits_and_says_why():
    asked = config_of("llama3_8b", "parallel=auto")
    config, reasons = chosen(asked, H100X8)
    found = search(asked, H100X8, vary=("mesh", "zero", "schedule"))
    best = found.ranked[0]
    assert not config.parallel.auto
    # Degrees as numbers, and nothing but the layout is chosen.
    assert analyse(config, H100X8).time.seconds == best.time.seconds == min(one.time.seconds for one in found.ranked)
    assert config.model_copy(update={"parallel": asked.parallel}) == asked
    assert reasons[0].startswith(
        f"parallel.auto chose {describe_layout(config)} out of {found.tried} layouts for h100x8"
    )
    assert any("need more memory" in line for line in reasons) == bool(found.too_large)


CONFIGS = [path.stem for path in (Path(jaxtrain.__file__).parent / "configs").glob("*")]
# id: (kinds of hardware, numbers of devices, configs)
ANSWERS = {
    "every hardware": (list(catalogue()), (8,), ["quickstart"]),
    "a pipeline, a ResNet, adapters": (["v5e"], (8,), ["llama3_8b", "resnet50_imagenet", "llama3.1_8b_lora"]),
    "one card": (["rtx4090"], (1, 4, 64), CONFIGS),
    "slices": (["v5e"], (8, 1024), CONFIGS),
}
LONG = ("one card", "slices")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.long] * (row in LONG)) for row in ANSWERS])
def test_every_config_has_a_plan_on_every_hardware(row):
    kinds, counts, names = ANSWERS[row]
    for kind, count in itertools.product(kinds, counts):
        (target,) = parse_targets(f"{kind}x{count}", catalogue() | {"cpu": nominal_cpu(count)})
        for name in names:
            config = config_of(name)
            plan = fitted_plan(config, target)
            lines = answer_lines(plan)
            # It says either that it fits or what would; no rows are lost or made where a layout takes the batch.
            assert " fits: " in lines[0] or lines[1].startswith("to change: ") or "not known" in lines[0], (name, lines)
            rows = plan.config.train.global_batch_size * plan.config.train.steps
            wanted = config.train.global_batch_size * config.train.steps
            assert abs(rows - wanted) < plan.config.train.global_batch_size, (name, target.name)
