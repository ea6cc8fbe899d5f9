"""Fine-tunings in the planner: what is stored, trained and computed is what the step stores, trains and computes."""

import math
from typing import Any

import jax
import pytest

from jaxtrain.config import load_config
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.plan.compile import sharded_bytes
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import catalogue
from jaxtrain.plan.state import finetuned
from jaxtrain.plan.step import with_degrees
from jaxtrain.plan.targets import target_of
from jaxtrain.plan.workload import describe_workload, model_tensors
from jaxtrain.train.build import build_step

LORA = "finetune.lora={rank: 4}"
# config, overrides, devices
STATES = {
    "adapters of some layers": ("quickstart", ["finetune.lora={rank: 2, targets: [query, 'blocks/mlp/*']}"], 1),
    "int8, fsdp and tensor": (
        *("quickstart", [LORA, "finetune.base=int8", "parallel.fsdp=4", "parallel.tensor=2", "precision.policy=bf16"]),
        8,
    ),
    "nf4, fsdp and zero": (
        *("quickstart", [LORA, "finetune.base=nf4", "parallel.fsdp=4", "parallel.zero=1", "optimizer.ema_decay=0.9"]),
        8,
    ),
    "nf4 without double quantization, pipe": (
        "quickstart",
        [LORA, "finetune.base=nf4", "finetune.double_quantization=false", "parallel.pipe=2", "model.num_layers=4"],
        2,
    ),
    "encoder-decoder, nf4": ("t5_small", [LORA, "finetune.base=nf4"], 1),
}


def step_of(config: Config, num_devices: int) -> Any:
    workload = describe_workload(config)
    return build_step(
        with_degrees(config, num_devices),
        input_shape=workload.input_shape,
        vocab_size=workload.vocab_size,
        num_outputs=workload.num_outputs,
        devices=jax.devices()[:num_devices],
    )


PLAIN = ("adapters of some layers", "nf4, fsdp and zero")


@pytest.mark.parametrize(
    ("name", "overrides", "num_devices"),
    [pytest.param(*row, id=name, marks=() if name in PLAIN else pytest.mark.long) for name, row in STATES.items()],
)
def test_state_is_that_of_the_step(name: str, overrides: list[str], num_devices: int) -> None:
    config = load_config(name, overrides=overrides, weights=False).config
    step = step_of(config, num_devices)
    stored = finetuned(config, model_tensors(config.model, describe_workload(config)))
    params = jax.tree_util.tree_leaves_with_path(step.abstract_state.params)
    assert stored.tensors.params == {path_name(path): leaf.shape for path, leaf in params}
    assert stored.frozen == {path_name(path) for path, _ in params if not step.model.adapted.trains(path_name(path))}
    memory = analyse(config, target_of(catalogue()["h100"], num_devices)).memory
    # What the analytic model leaves out are counters of a few bytes.
    assert memory.state_bytes == pytest.approx(sharded_bytes(step.abstract_state), rel=0.005)


# What is frozen, as the step stores it: a plan of too few bytes says that a run fits.
FROZEN = {
    "blocks in fp32": ["optimizer.freeze=['blocks/*']", "precision.policy=fp32"],
    "blocks in bf16_pure": ["optimizer.freeze=['blocks/*']", "precision.policy=bf16_pure"],
    "adapters in fp8": [LORA, "precision.policy=fp8"],
    "adapters over nf4 in bf16_pure": [LORA, "finetune.base=nf4", "precision.policy=bf16_pure"],
}


@pytest.mark.parametrize("overrides", FROZEN.values(), ids=FROZEN)
def test_what_is_frozen_takes_the_bytes_of_the_step(overrides: list[str]) -> None:
    config = load_config("quickstart", overrides=overrides).config
    state = step_of(config, 1).abstract_state
    parts = analyse(config, target_of(catalogue()["h100"], 1)).memory.parts
    assert parts["parameters"] == sharded_bytes(state.params)


# What dpo compares with is a copy of what is trained, in the compute dtype.
REFERENCES = {
    "all parameters": [],
    "adapters": [LORA],
}


@pytest.mark.parametrize("overrides", REFERENCES.values(), ids=REFERENCES)
def test_a_reference_takes_the_bytes_of_the_step(overrides: list[str]) -> None:
    pairs = ["task=dpo", "data={kind: chat, path: python_docs, sequence_length: 64}"]
    layout = ["parallel.fsdp=2", "precision.policy=bf16"]
    config = load_config("quickstart", overrides=[*pairs, *layout, *overrides]).config
    state = step_of(config, 2).abstract_state
    parts = analyse(config, target_of(catalogue()["h100"], 2)).memory.parts
    assert parts["reference model"] == sharded_bytes(state.reference)


def test_gpt3_trains_what_the_paper_counts() -> None:
    """Hu et al. 2021, table 4: rank 4 on query and value of GPT-3 175B. Nothing else has gradients or moments."""
    gpt3 = "model={num_layers: 96, embed_dim: 12288, num_heads: 96}"
    words = [gpt3, "finetune.lora={rank: 4, targets: [query, value]}", "data.sequence_length=256"]
    config = load_config("gpt2_124m", overrides=[*words, "train.accumulation_steps=1"]).config
    stored = finetuned(config, model_tensors(config.model, describe_workload(config)))
    assert stored.trained is not None
    assert sum(math.prod(stored.tensors.params[path]) for path in stored.trained) == 18_874_368


def test_nf4_takes_as_many_bits_as_its_paper_says() -> None:
    """Dettmers et al. 2023, section 3: 4 bits, 8 for 64 weights, 32 for 64 x 256."""
    config = load_config("llama2_13b_nf4", weights=False).config
    stored = finetuned(config, model_tensors(config.model, describe_workload(config)))
    kernels = [path for path in stored.tensors.params if "/base/" in path]
    stored_bytes = sum(math.prod(stored.tensors.params[path]) * stored.itemsizes[path] for path in kernels)
    assert 8 * stored_bytes / sum(stored.quantized.values()) == pytest.approx(4.127, abs=5e-4)


# id: (config, overrides, devices, the line)
SAME = {
    "an adapter of no layer": (
        *("quickstart", ["finetune.lora={rank: 4, targets: [quary]}"], 1),
        "lora.targets: 'quary' matches no linear layer",
    ),
    "tensor shards nothing": (
        *("digits_mlp", ["model.hidden_dims=[]", "parallel.tensor=2", "parallel.data=1"], 2),
        "parallel.tensor=2, but no parameter of the model mlp is sharded over it; give the model axes, such as ",
    ),
}


@pytest.mark.parametrize(("name", "overrides", "num_devices", "line"), SAME.values(), ids=SAME)
def test_a_plan_refuses_in_the_words_of_the_step(name: str, overrides: list[str], num_devices: int, line: str) -> None:
    config = load_config(name, overrides=overrides, weights=False).config
    refused = []
    target = target_of(catalogue()["h100"], num_devices)
    for check in (lambda: analyse(config, target), lambda: step_of(config, num_devices)):
        with pytest.raises(ConfigError) as caught:
            check()
        refused.append(str(caught.value))
    assert refused[0].startswith(line)
    assert refused[0] == refused[1]
