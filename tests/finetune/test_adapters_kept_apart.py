"""What an adapter run must not take for its own: kernels trained whole, another base, another scale."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.weights.base import describe_base, without_base

MODEL: dict[str, Any] = dict(
    kind="transformer", num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32, max_sequence_length=16, vocab_size=64
)


def model() -> jt.Model:
    return jt.build_model(MODEL, input_shape=(16,))


def step_of(lora: jt.LoraConfig, policy: str = "fp32") -> jt.TrainStep:
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    adapted = jt.adapt(model(), lora=lora)
    return jt.make_train_step(adapted, jt.language_modeling(), optax.sgd(0.1), mesh=mesh, policy=policy)


def test_a_kernel_below_an_adapter_is_not_trained_whole() -> None:
    whole = jt.LoraConfig(rank=2, targets=("query",), train_also=("blocks/attention/*",))
    with pytest.raises(ConfigError, match="which has an adapter"):
        jt.adapt(model(), lora=whole)
    beside = whole.model_copy(update={"train_also": ("blocks/mlp/up/kernel",)})
    with pytest.raises(ConfigError, match="which is stored in int8"):
        jt.adapt(model(), lora=beside, base="int8")
    # Of floats a kernel without an adapter may be trained whole.
    adapted = jt.adapt(model(), lora=beside).adapted
    assert adapted is not None
    assert adapted.trains("blocks/mlp/up/kernel")


def test_parameters_with_adapters_are_merged_before_they_are_quantized() -> None:
    adapted = jt.adapt(model(), lora=jt.LoraConfig(rank=2))
    params, _ = jax.eval_shape(adapted.init, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"has an adapter, .* merge it first"):
        jt.quantize(params, adapted, "int8")


LORA = jt.LoraConfig(rank=2, alpha=4.0, targets=("query",))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Adapters over a published folder, and that folder."""
    path = tmp_path_factory.mktemp("kept_apart")
    params, _ = jax.jit(model().init)(jax.random.key(7))
    folder = jt.save_pretrained(path / "model", params, model=MODEL)
    step = step_of(LORA)
    state = step.init(0, jt.load_weights(step, folder))
    trains = step.model.adapted.trains
    record = describe_base(state.params, trains, format="published", path=str(folder), seed=0)
    with Checkpointer(path / "run" / "checkpoints") as checkpointer:
        checkpointer.save(0, without_base(state, trains), metadata={"base": record.as_json()})
    return path / "run", folder


@pytest.mark.long
def test_adapters_of_another_scale_are_refused(run: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"trained with scale 2, .* gives scale 32"):
        jt.load_weights(step_of(LORA.model_copy(update={"alpha": 64.0})), run[0])
    # The same number in other words is no other scale.
    stabilised = LORA.model_copy(update={"alpha": 2 * 2**0.5, "rank_stabilised": True})
    assert jt.load_weights(step_of(stabilised), run[0]).params


@pytest.mark.long
def test_another_base_is_found_out_under_another_policy(run: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, folder = run
    right = jt.load_weights(step_of(LORA, "bf16"), run_dir).params["embedding"]
    assert right.dtype == jnp.bfloat16
    assert np.array_equal(right, jt.load_pretrained(folder).params["embedding"].astype(jnp.bfloat16))
    aside = folder.rename(tmp_path / "aside")
    try:
        other, _ = jax.jit(model().init)(jax.random.key(8))
        jt.save_pretrained(folder, other, model=MODEL)
        with pytest.raises(CheckpointError, match="is not the base of"):
            jt.load_weights(step_of(LORA, "bf16"), run_dir)
    finally:
        folder.rename(tmp_path / "other")
        aside.rename(folder)
