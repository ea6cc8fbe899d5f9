"""Where the search of a plan ends, and how it names a pipeline that leaves its microbatches to the trainer."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.search.analyse import analyse, with_degrees
from jaxtrain.plan.search.layouts import ASKED_FOR, VARIED, describe_layout, largest_batch, layouts, search


def test_the_largest_batch_is_one_that_was_tried():
    config = with_degrees(load_config("quickstart", overrides=["parallel.data=8"]).config, 8)
    asked = []

    def fits(one):
        asked.append(one.train.global_batch_size)
        return True

    assert largest_batch(config, fits, most=1024) == 1024
    assert max(asked) == 1024


def test_a_pipeline_names_the_microbatches_that_it_runs():
    config = with_degrees(load_config("gpt2_124m", overrides=["parallel.data=1", "parallel.pipe=4"]).config, 4)
    assert config.parallel.microbatches is None
    assert describe_layout(config) == "pipe=4, remat=dots, 1f1b with 4 microbatches"


BATCH = ("train.accumulation_steps=1", "train.global_batch_size=96")
# id: (config, target, overrides): values that no list of the search has.
OWN = {
    "microbatches": ("llama3.1_8b_lora", "rtx4090", ["train.global_batch_size=96", "train.accumulation_steps=96"]),
    "remat": (
        "gpt2_124m",
        "rtx4090",
        ["remat.policy=sqrt", "train.global_batch_size=96", "train.accumulation_steps=12"],
    ),
    "zero": ("gpt2_124m", "h100x8", ["parallel.zero=2", "train.accumulation_steps=8"]),
    "zero 3": ("gpt2_124m", "h100x8", ["parallel.zero=3"]),
    "schedule": (
        "gpt2_124m",
        "h100x4",
        ["parallel.schedule=gpipe", "parallel.pipe=4", "parallel.microbatches=12", *BATCH],
    ),
    "a short sequence on context": ("quickstart", "h100x2", ["parallel.context=2"]),
}


@pytest.mark.parametrize(("name", "on", "overrides"), OWN.values(), ids=OWN)
def test_a_search_tries_the_config_as_it_is(name: str, on: str, overrides: list[str]) -> None:
    config, (target,) = load_config(name, overrides=overrides, weights=False).config, parse_targets(on)
    tried = list(layouts(config, target.num_devices, VARIED))
    assert len({one.model_dump_json() for one in tried}) == len(tried)
    own = analyse(config, target)
    found = [analyse(tried[0], target)]
    # On a mesh that the search chose, stage 3 is its axis `fsdp`.
    assert found[0].degrees == own.degrees
    assert (found[0].memory, found[0].time) == (own.memory, own.time)


def test_what_is_asked_for_is_tried_beside_the_config_s_own() -> None:
    overrides = ["precision.policy=fp16", "optimizer.kind=sgd", "train.global_batch_size=12", "finetune.lora.rank=3"]
    config = load_config("smollm2_lora", overrides=overrides, weights=False).config
    tried = list(layouts(config, 1, ASKED_FOR))
    assert tried[0].model_dump(exclude={"parallel"}) == config.model_dump(exclude={"parallel"})
    assert {one.precision.policy for one in tried} == {"fp16", "bf16", "bf16_pure"}


def test_microbatches_are_tried_up_to_a_row_on_each_device() -> None:
    config = load_config("gpt2_124m", overrides=["train.global_batch_size=512"]).config
    found = search(config, parse_targets("rtx4090x8")[0], vary=("microbatches",))
    counts = {one.config.train.accumulation_steps for one in (*found.ranked, *found.too_large)}
    assert {1, 2, 4, 8, 16, 32, 64} <= counts
    assert max(counts) == 64
