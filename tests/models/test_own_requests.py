"""What somebody asks of their own model works or is refused: stages, axes, metadata, remat, formats, freezing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxtrain import (
    ConfigError,
    Model,
    Parallelism,
    Remat,
    TrainStep,
    classification,
    from_linen,
    from_nnx,
    from_stages,
    load_config,
    make_mesh,
    make_stack,
    make_train_step,
)
from jaxtrain.layout.sharding import path_name
from jaxtrain.train.build import build_step

ROWS = np.ones((8, 8), np.float32)
BATCH = {"inputs": ROWS, "targets": np.zeros(8, np.int32)}
LECUN = linen.initializers.lecun_normal()


class LinenNet(linen.Module):
    first: Any = None
    last: Any = None

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, dtype=self.last)(linen.relu(linen.Dense(16, dtype=self.first)(x)))


class LinenNamed(linen.Module):
    wrap: Callable[..., Any]
    names: tuple[Any, ...] = ("embed", "mlp")

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(16, kernel_init=self.wrap(LECUN, self.names))(x)
        return linen.Dense(4, kernel_init=self.wrap(LECUN, self.names[::-1]))(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, dtype: Any = None, names: tuple[Any, ...] | None = None):
        def init(names):
            return LECUN if names is None else nnx.with_partitioning(LECUN, names)

        self.first = nnx.Linear(8, 16, dtype=dtype, kernel_init=init(names), rngs=rngs)
        self.last = nnx.Linear(16, 4, dtype=dtype, kernel_init=init(names and names[::-1]), rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class Residual(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        up, down = (nnx.with_partitioning(LECUN, names) for names in (("embed", "mlp"), ("mlp", "embed")))
        self.up = nnx.Linear(8, 16, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Stages(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = make_stack(Residual, 4, rngs)


def stages(remat: Remat | None = None) -> Model:
    return from_stages(
        Stages,
        stack="blocks",
        embed=lambda module, x, key, train: x,
        block=lambda block, x, inputs, key, train: block(x),
        head=lambda module, x, train: x[:, :4],
        remat=remat,
    )


def step_of(
    model: Model, degrees: dict[str, int] | None = None, *, parallelism: Any = None, **options: Any
) -> TrainStep:
    degrees = {"data": 1, **(degrees or {})}
    mesh = make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    parallelism = Parallelism(max_replicated_fraction=1, **(parallelism or {}))
    return make_train_step(model, classification(), optax.sgd(0.1), mesh=mesh, parallelism=parallelism, **options)


def specs(step: TrainStep) -> dict[str, tuple[Any, ...]]:
    params = jax.tree_util.tree_leaves_with_path(step.state_shardings.params)
    return {path_name(path): tuple(sharding.spec) for path, sharding in params if any(sharding.spec)}


PLAIN = from_linen(LinenNet(), ROWS)
TENSOR = dict(tensor=2)

REFUSED = {
    "tensor without a table": (PLAIN, dict(degrees=TENSOR), "parallel.tensor=2, but no parameter .*'Dense_1/kernel'"),
    "row that matches nothing": (
        from_linen(LinenNet(), ROWS, axes={"Dens_0/kernel": ("embed", "mlp")}),
        {},
        "LinenNet: 'Dens_0/kernel' matches no parameter",
    ),
    "row of another rank": (
        from_linen(LinenNet(), ROWS, axes={"Dense_0/kernel": ("embed",)}),
        {},
        "Dense_0/kernel has shape .* names 1 axes",
    ),
    "no parameter trained": (PLAIN, dict(trainable=lambda path: "lora" in path), "selects no parameter"),
    "unknown name in the metadata": (
        from_nnx(lambda rngs: NNXNet(rngs, names=("embed", "width"))),
        {},
        "no sharding rule for logical axis 'width'",
    ),
    "rule to an unknown mesh axis": (PLAIN, dict(rules={"mlp": ("model",)}), "'mlp' goes to mesh axis 'model'"),
    "fp8 without our linear layers": (PLAIN, dict(policy="fp8"), "the model LinenNet has none"),
}


@pytest.mark.parametrize(("model", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_do_nothing_is_refused(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_of(model, **options).lower(BATCH)


LINEN_SPECS = {"Dense_0/kernel": ("fsdp", "tensor"), "Dense_1/kernel": ("tensor", "fsdp")}
NNX_SPECS = {"first/kernel": ("fsdp", "tensor"), "last/kernel": ("tensor", "fsdp")}
METADATA = {
    "logical names": (lambda: from_linen(LinenNamed(linen.with_logical_partitioning), ROWS), LINEN_SPECS),
    "nnx": (lambda: from_nnx(lambda rngs: NNXNet(rngs, names=("embed", "mlp"))), NNX_SPECS),
    "nnx stack": (
        stages,
        {"blocks/up/kernel": (None, "fsdp", "tensor"), "blocks/down/kernel": (None, "tensor", "fsdp")},
    ),
}


@pytest.mark.parametrize(("make", "expected"), METADATA.values(), ids=METADATA)
def test_partitioning_metadata_is_the_axes_table(make: Callable[[], Model], expected: dict[str, Any]) -> None:
    found = specs(step_of(make(), dict(fsdp=2, tensor=2)))
    assert {path: spec for path, spec in found.items() if "kernel" in path} == expected


def test_a_table_wins_over_metadata_and_a_rule_names_what_is_unknown() -> None:
    named = LinenNamed(linen.with_logical_partitioning, (None, "model"))
    table = {"Dense_0/kernel": ("mlp", None)}
    assert specs(step_of(from_linen(named, ROWS, axes=table), TENSOR)) == {"Dense_0/kernel": ("tensor", None)}
    ruled = step_of(from_linen(named, ROWS), TENSOR, rules={"model": ("tensor",)})
    assert specs(ruled) == {"Dense_0/kernel": (None, "tensor"), "Dense_1/kernel": ("tensor", None)}


def test_what_cannot_be_stages() -> None:
    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = make_stack(lambda rngs: nnx.BatchNorm(4, rngs=rngs), 2, rngs)

    def nothing(*_: object) -> jax.Array:
        return jnp.zeros(())

    with pytest.raises(ConfigError, match="blocks/mean is not a parameter"):
        from_stages(Noisy, stack="blocks", embed=nothing, block=nothing, head=nothing)


def built(model: Model, policy: str = "full") -> TrainStep:
    config = load_config({"remat": {"policy": policy}, "task": "classification", "parallel": {"data": 1}}).config
    return build_step(config, input_shape=(8,), model=model, devices=jax.devices()[:1])


def test_a_model_from_python_keeps_its_own_remat_policy() -> None:
    assert built(stages(Remat(policy="full"))).model.remat == Remat(policy="full")
    # The default of a config asks for nothing of a model that has its own policy, or can have none.
    assert built(stages(Remat(policy="full")), "dots").model.remat == Remat(policy="full")
    assert built(PLAIN, "dots").model is PLAIN
    for model in (PLAIN, stages(), stages(Remat(policy="sqrt"))):
        with pytest.raises(ConfigError, match=r"remat.policy=full does not apply.*from_stages\(remat"):
            built(model)
