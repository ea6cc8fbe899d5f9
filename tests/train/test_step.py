"""The train step: own models, clipping, frozen parameters, precision, dropout, non-finite gradients."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxtrain.config import load_config
from jaxtrain.config.model import MLPConfig, TransformerConfig
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.from_nnx import from_nnx
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import classification, language_modeling
from jaxtrain.models.wrap import from_functions, from_linen
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.precision.policy import LossScaling
from jaxtrain.train.build import make_train_step
from jaxtrain.train.program import take_step
from jaxtrain.train.step import TrainStep

RNG = np.random.default_rng(0)
CENTERS = RNG.normal(size=(4, 8)).astype(np.float32)


def rows(count: int = 32, seed: int = 0) -> dict[str, np.ndarray]:
    """Four well separated classes."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 4, count).astype(np.int32)
    return {"inputs": CENTERS[targets] + 0.1 * rng.normal(size=(count, 8)).astype(np.float32), "targets": targets}


def tokens(seed: int = 0) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 32, (8, 17)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def mlp(dropout: float = 0.0) -> Model:
    return build_model(MLPConfig(hidden_dims=(16,), dropout=dropout), input_shape=(8,), num_outputs=4)


def transformer() -> Model:
    config = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=16)
    return build_model(config, input_shape=(16,), vocab_size=32)


def one_device() -> jax.sharding.Mesh:
    return make_mesh(devices=jax.devices()[:1])


def make(model: Model | None = None, **options: Any) -> TrainStep:
    options.setdefault("mesh", one_device())
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    return make_train_step(model or mlp(), classification(), optimizer, **options)


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(tree))


class NNXNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.output = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(16)(x))
        x = linen.Dropout(0.1, deterministic=not train)(linen.relu(x))
        return linen.Dense(4)(x)


def functions_model() -> Model:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"kernel": 0.1 * jax.random.normal(key, (8, 4)), "bias": jnp.zeros(4)}

    return from_functions(init, lambda params, x: x @ params["kernel"] + params["bias"])


USER_MODELS = {
    "nnx": lambda: from_nnx(lambda rngs: NNXNet(rngs)),
    "linen": lambda: from_linen(LinenNet(), jax.ShapeDtypeStruct((2, 8), jnp.float32)),
    "functions": functions_model,
}


@pytest.mark.parametrize(
    "name", ["linen", *(pytest.param(n, marks=pytest.mark.long) for n in USER_MODELS if n != "linen")]
)
def test_users_models_train_sharded_without_a_table(name: str) -> None:
    step = make(USER_MODELS[name](), mesh=make_mesh(data=4, fsdp=2), optimizer=optax.adam(1e-2))
    state = step.init(0)
    for k in range(60):
        state, metrics = step(state, rows(64, seed=k))
    # Chance is 0.25 and ln 4 = 1.39; the classes are separable.
    assert metrics["accuracy"] > 0.9
    assert metrics["loss"] < 0.6
    assert any("fsdp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params))


def test_clipping_bounds_the_update_and_reports_the_unclipped_norm() -> None:
    step = make(functions_model(), optimizer=optax.sgd(1.0), clip_norm=0.5)

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        logits = batch["inputs"] @ params["kernel"] + params["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    found = []
    for size in (100, 0.01):
        state, batch = step.init(0), {**rows(), "inputs": rows()["inputs"] * np.float32(size)}
        before = host(state.params)
        gradient = jax.jit(jax.grad(mean_loss))(before, batch)
        norm = float(optax.tree.norm(gradient))
        after, metrics = step(state, batch)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name in before:
            wanted = gradient[name] * min(1, 0.5 / norm)
            np.testing.assert_allclose(before[name] - after.params[name], wanted, rtol=1e-4, atol=1e-5)
        found.append(norm)
    assert found[0] > 1 > 0.5 > found[1], "one gradient is clipped, and one is not"


def test_frozen_parameters_stay_keep_their_dtype_and_have_no_optimizer_state_or_average() -> None:
    """Quantized weights under a trained adapter: int8 and bf16 leaves come out of 50 steps bit for bit."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        frozen = jax.random.randint(key, (8, 4), -127, 127, jnp.int8)
        return {"frozen": frozen, "scale": jnp.full((4,), 0.01, jnp.bfloat16), "adapter": jnp.zeros((8, 4))}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return x @ (params["frozen"].astype(x.dtype) * params["scale"].astype(x.dtype) + params["adapter"])

    step = make(
        from_functions(init, apply),
        optimizer=optax.adam(1e-2),
        trainable=lambda path: path == "adapter",
        ema_decay=0.9999,
    )
    state = step.init(0)
    before = host(state.params)
    assert (before["frozen"].dtype, before["scale"].dtype) == (np.int8, jnp.bfloat16)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim) == 2 * 8 * 4
    for k in range(50):
        state, _ = step(state, rows(seed=k))
    after = host(state.evaluation_params)
    np.testing.assert_array_equal(after["frozen"], before["frozen"])
    np.testing.assert_array_equal(after["scale"], before["scale"])
    assert not np.array_equal(after["adapter"], before["adapter"])
    assert len(jax.tree.leaves(state.ema)) == 1


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_non_finite_batch_touches_nothing_and_is_counted(policy: str) -> None:
    step = make(policy=policy, optimizer=optax.adam(1e-2), ema_decay=0.5, accumulation_steps=2)
    state, _ = step(step.init(0), rows())
    for skipped, bad in enumerate((np.nan, np.inf), 1):
        before = host((state.params, state.optimizer_state, state.ema, state.model_state))
        broken = rows(seed=skipped)
        broken["inputs"][3, 2] = bad
        state, metrics = step(state, broken)
        after = host((state.params, state.optimizer_state, state.ema, state.model_state))
        jax.tree.map(np.testing.assert_array_equal, after, before)
        # A fp16 scale that can still fall is searching, so its skips do not count towards giving up.
        in_a_row = 0 if policy == "fp16" else 1
        assert (int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) == (skipped, in_a_row)
        state, metrics = step(state, rows(seed=5))
        assert (int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) == (skipped, 0)
        assert int(state.step) == 1 + 2 * skipped
        assert not np.array_equal(host(state.params)["output"]["kernel"], before[0]["output"]["kernel"])


def test_the_learning_rate_is_that_of_the_accepted_steps() -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    step = make(optimizer=optax.sgd(schedule), learning_rate=schedule)
    state, rates = step.init(0), []
    for number in range(4):
        batch = rows(seed=number)
        batch["inputs"][0, 0] = np.nan if number == 1 else 0.0
        state, metrics = step(state, batch)
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [0.1, 0.09, 0.09, 0.08], rtol=1e-6)


def test_fp16_recovers_from_a_scale_that_is_far_too_high() -> None:
    scaling = LossScaling(initial=2.0**24, growth_interval=20)
    step = make(policy="fp16", optimizer=optax.adam(1e-2), loss_scaling=scaling)
    state = step.init(0)
    scales = []
    for k in range(80):
        state, metrics = step(state, rows(64, seed=k))
        scales.append(float(metrics["loss_scale"]))
    skipped = int(metrics["skipped_steps"])
    # 2^24 overflows float16 (largest 65,504) for gradients above 0.004; each skip halves the scale.
    assert 4 <= skipped <= 20
    assert int(metrics["skipped_in_a_row"]) == 0
    assert min(scales) < 2.0**20
    assert scales[-1] > min(scales), "a scale that never grows again would cost range"
    assert metrics["accuracy"] > 0.9


@functools.cache
def losses_of(policy: str) -> tuple[list[float], Any, set[Any], set[Any]]:
    """Ten losses of the transformer and the norm of its first gradients, the dtype of losses, and those of parameters
    and of moments after them."""
    step = make_train_step(transformer(), language_modeling(), optax.adam(1e-3), mesh=one_device(), policy=policy)
    step.compile(tokens())  # so that a state whose dtypes move would be an error
    state, metrics, losses = step.init(0), {}, []
    for k in range(10):
        state, metrics = step(state, tokens(k % 2))
        losses += [float(metrics["loss"])] if k else [float(metrics["loss"]), float(metrics["grad_norm"])]
    moments = {leaf.dtype for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim}
    return losses, metrics["loss"].dtype, {leaf.dtype for leaf in jax.tree.leaves(state.params)}, moments


@pytest.mark.parametrize(
    ("policy", "param_dtype", "tolerance"),
    [
        # bf16 has 8 bits: rounding of 2^-9 a product, over a loss of about 1.
        ("bf16", jnp.float32, 2e-2),
        pytest.param("bf16_pure", jnp.bfloat16, 3e-2, marks=pytest.mark.long),
        ("fp16", jnp.float32, 2e-3),
    ],
)
def test_precision_policies_follow_fp32(policy: str, param_dtype: Any, tolerance: float) -> None:
    losses, dtype, params, moments = losses_of(policy)
    assert params == {jnp.dtype(param_dtype)}
    assert dtype == jnp.float32
    assert moments == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(losses, losses_of("fp32")[0], rtol=tolerance)


def test_bf16_computes_matmuls_in_bf16_and_softmax_in_fp32() -> None:
    step = make_train_step(transformer(), language_modeling(), optax.adam(1e-3), mesh=one_device(), policy="bf16")
    text = step.lower(tokens()).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("bf16" in line for line in products), "a matmul in fp32 under bf16 costs half the speed or more"
    exponentials = [line for line in text.splitlines() if "stablehlo.exponential" in line]
    assert exponentials
    # The gate of SwiGLU may run in bf16; every softmax and the loss reduce over fp32.
    assert sum("f32" in line and "bf16" not in line for line in exponentials) >= 2


def test_dropout_differs_between_steps_repeats_between_runs_and_is_the_same_on_every_mesh() -> None:
    """Keys derive from the state's key and step: two runs agree, and a batch seen twice is not treated alike."""
    losses = []
    for mesh, accumulation in ((one_device(), 1), (make_mesh(data=4, tensor=2), 1), (make_mesh(data=4, tensor=2), 2)):
        step = make(mlp(dropout=0.5), optimizer=optax.sgd(0.0), mesh=mesh, accumulation_steps=accumulation)
        for _ in range(2):
            state = step.init(0)
            for _ in range(2):
                state, metrics = step(state, rows())
                losses.append(float(metrics["loss"]))
    assert losses[:2] == losses[2:4]
    assert losses[0] != losses[1]
    assert losses[4:8] == pytest.approx(losses[:4], rel=1e-6)
    assert losses[8:] == pytest.approx(losses[:4], rel=1e-6)


OPTIMIZERS = ["adamw", "adafactor", "muon", "adamw bfloat16", "adamw int8"]


@pytest.mark.parametrize("policy", ["bf16_pure", "fp16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_keeps_its_structure_and_dtypes(kind: str, policy: str) -> None:
    """What comes out of a step can go in again: same tree, shapes and dtypes, for every optimizer and policy."""
    kind, _, moments = kind.partition(" ")
    stored = {"moments": moments} if moments else {}
    group = {"kind": kind, "weight_decay": 0.1, "ema_decay": 0.9, **stored}
    config = load_config({"optimizer": group}).config.optimizer
    optimizer = build_optimizer(config, optax.constant_schedule(1e-3), axes={})
    # Wide enough for moments that are not float32.
    model = build_model(MLPConfig(hidden_dims=(512,)), input_shape=(8,), num_outputs=4)
    step = make(model, policy=policy, optimizer=optimizer, ema_decay=0.9, accumulation_steps=2)
    after, _ = jax.eval_shape(functools.partial(take_step, step.program), step.abstract_state, rows())
    chex.assert_trees_all_equal_shapes_and_dtypes(after, step.abstract_state)
