"""Logical axes to mesh axes: rows of parameters, optimizer state, the guard on replicated bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.layout.gather import gather_parameters
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import check_replicated_share
from jaxtrain.layout.sharding import (
    Layout,
    constrain,
    logical_spec,
    optimizer_shardings,
    parameter_shardings,
    parameter_spec,
    use_layout,
)

TABLE = {
    "embedding": ("vocab", "embed"),
    "blocks/kernel": ("layers", "embed", "mlp"),
    "blocks/*norm/scale": ("layers", "embed"),
    "*/bias": ("mlp",),
    "odd": ("vocab", "mlp"),
    "nameless": ("wormhole",),
}


def layout(table=None, **degrees):
    return Layout(make_mesh(**{"data": 1, **degrees}), TABLE if table is None else table)


# mesh, path, shape, spec
SPECS = {
    "exact row": (dict(fsdp=4, tensor=2), "embedding", (64, 32), ("tensor", "fsdp")),
    "row with a layer dim": (dict(fsdp=4, tensor=2), "blocks/kernel", (3, 8, 6), (None, "fsdp", "tensor")),
    "pattern across levels": (dict(tensor=8), "a/b/bias", (16,), ("tensor",)),
    "unknown path: largest dim": (dict(fsdp=8), "mine/kernel", (16, 64, 3), (None, "fsdp", None)),
    "unknown path: largest that divides": (dict(fsdp=8), "mine/kernel", (16, 65), ("fsdp", None)),
    "unknown path: none divides": (dict(fsdp=8), "mine/kernel", (3, 5), (None, None)),
    "unknown path: tensor is not guessed": (dict(fsdp=4, tensor=2), "mine/kernel", (16, 64), (None, "fsdp")),
    "fsdp moves to another dim": (dict(fsdp=8), "embedding", (64, 31), ("fsdp", None)),
    "fsdp moves but not to the layers": (dict(fsdp=8), "blocks/kernel", (8, 3, 16), (None, None, "fsdp")),
    "fsdp does not share a dim with tensor": (dict(fsdp=4, tensor=2), "embedding", (64, 31), ("tensor", None)),
    "two dims on an axis that is not spread": (dict(fsdp=8), "odd", (8, 8), (None, None)),
    "fsdp finds no dim": (dict(fsdp=8), "blocks/mlp_norm/scale", (8, 3), (None, None)),
}  # fmt: skip


def test_parameter_spec():
    for name, (degrees, path, shape, spec) in SPECS.items():
        assert tuple(parameter_spec(path, shape, layout(**degrees))) == spec, name


# What does not divide is refused in tests/parallel/test_refusals.py.
@pytest.mark.parametrize(
    ("degrees", "path", "shape", "message"),
    [
        (dict(fsdp=8), "embedding", (8,), r"embedding has shape \(8,\) but the row \('vocab', 'embed'\) names 2 axes"),
        (dict(tensor=8), "odd", (8, 8), r"'vocab' and 'mlp' of \('vocab', 'mlp'\) both want mesh axis 'tensor'"),
        (
            dict(fsdp=8),
            "nameless",
            (8,),
            "no sharding rule for logical axis 'wormhole' of .*; known: embed, .*rules={",
        ),
    ],
    ids=["another rank", "two dims on one axis", "no such name"],
)
def test_wrong_rows(degrees, path, shape, message):
    with pytest.raises(ConfigError, match=message):
        parameter_spec(path, shape, layout(**degrees))


def test_batch_is_spread_over_data_and_fsdp():
    assert tuple(logical_spec(("batch", "sequence"), layout(data=2, fsdp=4))) == (("data", "fsdp"), None)
    assert tuple(logical_spec(("batch", None), layout(data=8))) == ("data", None)


PARAMS = {
    "embedding": jax.ShapeDtypeStruct((256, 128), jnp.float32),
    "blocks": {
        "kernel": jax.ShapeDtypeStruct((3, 128, 136), jnp.float32),
        "mlp_norm": {"scale": jax.ShapeDtypeStruct((3, 128), jnp.float32)},
    },
}


def specs(shardings):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(sharding.spec)
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings)
    }


def test_state_that_mirrors_a_parameter_lies_as_it_does():
    where, copies = layout(fsdp=4, tensor=2), 2
    state = jax.eval_shape(optax.adamw(0.1).init, PARAMS)
    found = specs(optimizer_shardings(state, PARAMS, where))
    for path, spec in specs(parameter_shardings(PARAMS, where)).items():
        mirrored = [found[key] for key in found if key.endswith(path)]
        assert mirrored == [spec] * copies, path
    assert all(spec == () for key, spec in found.items() if key.endswith("count"))


def test_factored_state_lies_as_the_dims_that_it_keeps():
    where = layout(fsdp=4, tensor=2)
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=128)
    state = jax.eval_shape(optimizer.init, PARAMS)
    found = specs(optimizer_shardings(state, PARAMS, where))
    # Sums [128] of the width and [256] of the vocabulary; placeholders of one element; the norm's own shape.
    assert found["v_row/embedding"] == ("fsdp",)
    assert found["v_col/embedding"] == ("tensor",)
    assert found["v/embedding"] == (None,)
    assert found["v/blocks/mlp_norm/scale"] == (None, "fsdp")


def test_replicated_bytes():
    check_replicated_share({"b": 252}, 16636, 8, 0.02)
    shares = {"b/c": 252, "b/d": 4356}
    with pytest.raises(ConfigError) as caught:
        check_replicated_share(shares, 20992, 8, 0.02)
    assert str(caught.value) == (
        "22.0% of parameter bytes are replicated although parallel.fsdp=8 (largest: b/d, b/c); "
        "give them dims that divide, lower parallel.fsdp, or allow it with parallel.max_replicated_fraction=0.22"
    )
    check_replicated_share(shares, 20992, 8, 0.22)


def test_constrain_lays_out_what_divides_and_leaves_the_rest():
    where = layout(data=4, tensor=2)

    def spec(shape, *names):
        with use_layout(where):
            return jax.jit(lambda x: constrain(x, *names))(jnp.ones(shape)).sharding

    assert spec((8, 3), "batch", "activation_mlp").is_equivalent_to(
        NamedSharding(where.mesh, PartitionSpec("data", None)), 2
    )
    assert spec((8, 4), "batch", "activation_mlp").is_equivalent_to(
        NamedSharding(where.mesh, PartitionSpec("data", "tensor")), 2
    )
    assert spec((1, 4), "batch", None).is_fully_replicated


def test_gathered_parameters_of_a_layer_and_their_gradients():
    where = layout({"blocks/w": ("layers", "embed", "mlp")}, fsdp=4, tensor=2)
    stored = NamedSharding(where.mesh, PartitionSpec("fsdp", "tensor"))
    w = jax.device_put(jnp.arange(32.0).reshape(8, 4), stored)

    @jax.jit
    def run(w):
        with use_layout(where):
            return gather_parameters({"w": w}, prefix="blocks", num_layers=3)["w"]

    assert run(w).sharding.is_equivalent_to(NamedSharding(where.mesh, PartitionSpec(None, "tensor")), 2)
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(run(w) ** 2)))(w)
    assert gradient.sharding.is_equivalent_to(stored, 2)
    np.testing.assert_array_equal(gradient, 2 * np.arange(32.0).reshape(8, 4))
