"""The planner takes attention over `context` the way that the step does, and holds what that way holds."""

import itertools
import re

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout
from jaxtrain.ops.attention.context import choose_context
from jaxtrain.ops.attention.form import AttentionForm
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.work.attention import attention_work, context_way

WINDOW = ["model.sliding_window=128"]
EXTRA = {"plain": [], "window": WINDOW, "softcap": ["model.attention_softcap=50.0"]}


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("way", ["auto", "ring", "all_to_all", "gather"])
def test_the_way_is_that_of_the_step(way, extra):
    compared = 0
    for (pipe, tensor, context), heads in itertools.product([(1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2)], [4, 6, 8]):
        degrees = dict(pipe=pipe, tensor=tensor, context=context, data=1)
        keys = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
        own = ["model.embed_dim=192", f"model.num_heads={heads}", f"parallel.context_attention={way}"]
        config = load_config("quickstart", overrides=[*keys, *own, *EXTRA[extra]]).config
        form = AttentionForm(True, config.model.sliding_window, config.model.attention_softcap)
        try:
            chosen = choose_context(Layout(make_mesh(**degrees), context_attention=way), heads, heads, form)
        except ConfigError as error:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                context_way(config, config.model)
            continue
        assert context_way(config, config.model) == chosen, (degrees, heads)
        compared += 1
    assert (compared == 0) == (way == "ring" and extra != "plain"), "a ring knows neither window nor softcap"


def test_all_to_all_holds_a_part_of_the_heads_of_the_implementation():
    (target,) = parse_targets("h100x4", None)
    given = ["data.sequence_length=8192", "parallel.fsdp=1", "parallel.data=1"]

    def work(*overrides):
        config = load_config("llama3_8b", overrides=[*given, *overrides]).config
        found = attention_work(config, config.model, target, 8192)
        assert found is not None
        return found.pairs_at_once

    softcap = "model.attention_softcap=50.0"  # not for cuDNN, so that scores are in memory
    whole = work("parallel.context=1", softcap)
    assert 0 < work("parallel.context=4", softcap, "parallel.context_attention=all_to_all") == whole / 4
    assert work("parallel.context=4", "parallel.context_attention=gather") == 8192**2 / 4
    assert work("parallel.context=4", "parallel.context_attention=ring") == 2048**2


REFUSED = {
    "another platform": ("h100x8", ["model.attention=splash"], "splash cannot run on h100x8: the platform is gpu;"),
    "AMD": ("mi300xx8", ["model.attention=cudnn"], "cudnn cannot run on mi300xx8: the platform is rocm;"),
    "before Ampere": ("t4x4", ["model.attention=cudnn"], "cudnn cannot run on t4x4: the GPU is older than compute"),
    "dtype": ("h100x8", ["model.attention=cudnn", "precision.policy=fp32"], "the dtype is float32, it takes bfloat16"),
    "length": ("v5e-16", ["model.attention=splash", "data.sequence_length=100"], "the sequence is 100 long"),
    "two halves": ("h100x8", ["parallel.context=8", "data.sequence_length=40"], "divide by 2 x parallel.context=8"),
}  # fmt: skip


@pytest.mark.parametrize(("hardware", "overrides", "says"), REFUSED.values(), ids=REFUSED)
def test_a_plan_refuses_attention_that_the_step_refuses(hardware, overrides, says):
    (target,) = parse_targets(hardware, None)
    config = load_config("gpt2_124m", overrides=["parallel.data=1", *overrides]).config
    with pytest.raises(ConfigError, match=re.escape(says)):
        attention_work(config, config.model, target, config.data.sequence_length)
