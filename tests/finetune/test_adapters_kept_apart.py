"""What an adapter run must not take for its own: kernels trained whole, another base, another scale, another dtype."""

import dataclasses
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
from jaxtrain.interop.companions import Texts
from jaxtrain.train.base import describe_base, without_base

MODEL: dict[str, Any] = dict(
    kind="transformer", num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, max_sequence_length=16, vocab_size=64
)


def model() -> jt.Model:
    return jt.build_model(MODEL, input_shape=(16,))


def step_of(lora: jt.LoraConfig, policy: str = "fp32") -> jt.TrainStep:
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    adapted = jt.adapt(model(), lora=lora)
    return jt.make_train_step(adapted, jt.language_modeling(), optax.sgd(0.1), mesh=mesh, policy=policy)


@pytest.mark.parametrize(
    ("pattern", "base", "says"),
    [
        pytest.param("blocks/attention/query/kernel", None, "which has an adapter", id="an adapted kernel"),
        pytest.param("blocks/attention/*", None, "which has an adapter", id="a pattern over an adapted kernel"),
        pytest.param("blocks/mlp/up/kernel", "nf4", "which is stored in nf4", id="a quantized kernel"),
        pytest.param("blocks/mlp/*", "int8", "which is stored in int8", id="a pattern over quantized kernels"),
    ],
)
def test_a_kernel_below_an_adapter_is_not_trained_whole(pattern: str, base: str | None, says: str) -> None:
    lora = jt.LoraConfig(rank=2, targets=("query",), train_also=(pattern,))
    with pytest.raises(ConfigError, match=says):
        jt.adapt(model(), lora=lora, base=base)
    if base is not None:  # of floats a kernel without an adapter may be trained whole
        adapted = jt.adapt(model(), lora=lora)
        assert adapted.adapted is not None
        assert adapted.adapted.trains("blocks/mlp/up/kernel")


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
    state = step.init(0, params=folder)
    trains = step.model.adapted.trains
    record = describe_base(state.params, trains, format="published", path=str(folder), seed=0)
    with Checkpointer(path / "run" / "checkpoints") as checkpointer:
        checkpointer.save(0, without_base(state, trains), metadata={"base": record.as_json()})
    return path / "run", folder


def test_adapters_of_another_scale_are_refused(run: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"trained with products multiplied by 2, .* multiplies by 32"):
        step_of(LORA.model_copy(update={"alpha": 64.0})).init(0, params=run[0])
    # The same number in other words is no other scale.
    stabilised = LORA.model_copy(update={"alpha": 2 * 2**0.5, "rank_stabilised": True})
    assert step_of(stabilised).init(0, params=run[0]).params


def test_another_base_is_found_out_under_another_policy(run: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, folder = run
    right = step_of(LORA, "bf16").init(0, params=run_dir).params["embedding"]
    assert right.dtype == jnp.bfloat16
    assert np.array_equal(right, jt.load_pretrained(folder).params["embedding"].astype(jnp.bfloat16))
    aside = folder.rename(tmp_path / "aside")
    try:
        other, _ = jax.jit(model().init)(jax.random.key(8))
        jt.save_pretrained(folder, other, model=MODEL)
        with pytest.raises(CheckpointError, match="is not the base of"):
            step_of(LORA, "bf16").init(0, params=run_dir)
    finally:
        folder.rename(tmp_path / "other")
        aside.rename(folder)


@pytest.mark.long
def test_what_fp16_stored_is_merged(tmp_path: Path) -> None:
    from jaxtrain.interop.settings import settings_of
    from jaxtrain.run.merged import write_merged

    adapted = jt.adapt(model(), lora=LORA)
    drawn, _ = jax.jit(adapted.init)(jax.random.key(0))

    def stored(path: tuple, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return leaf + 0.3 if "lora_b" in name else leaf if "lora_a" in name else leaf.astype(jnp.float16)

    params = jax.tree_util.tree_map_with_path(stored, drawn)
    group = jt.load_config({"model": MODEL}).config.model
    options: dict[str, Any] = dict(origin=None, dtype=None, max_shard_size="5GB", tokenizer=None, texts=Texts())
    write_merged(tmp_path / "out", settings_of(group), params, {}, model=adapted, **options)
    kernel = params["blocks"]["attention"]["query"]["kernel"]
    floats = dataclasses.replace(kernel, base=kernel.base.astype(jnp.float32))
    params["blocks"]["attention"]["query"]["kernel"] = floats
    wanted = jt.merge_adapters(params, adapted)["blocks"]["attention"]["query"]["kernel"]
    found = jt.load_pretrained(tmp_path / "out").params["blocks"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(found, wanted)
