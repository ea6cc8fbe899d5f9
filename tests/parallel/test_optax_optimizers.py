"""The optimizers of optax and optax.contrib: equal on a mesh, sharded, saved and resumed.

They train side by side in one program: a copy of a small model each, so that all of them cost two compilations.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from layouts import make_mesh_of

import jaxtrain as jt
from jaxtrain.runtime.tree import path_name

contrib = optax.contrib
MESHES = {"one device": dict(data=1), "data=2,fsdp=4": dict(data=2, fsdp=4)}
BATCH = {
    "inputs": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "targets": (np.arange(16) % 4).astype(np.int32),
}
STEPS = 5

BY_RATE = (
    *("adabelief", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
    *("fromage", "lamb", "novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "rprop", "sign_sgd", "signum", "yogi"),
)
CONTRIB_BY_RATE = ("acprop", "ademamix", "adopt", "madgrad", "muon", "schedule_free_adamw", "simplified_ademamix")
WITHOUT_RATE = ("cocob", "dadapt_adamw", "dog", "dowg", "momo", "momo_adam", "prodigy")
# Name in optax -> one made for the small model.
SIDE_BY_SIDE: dict[str, optax.GradientTransformation] = {
    **{name: getattr(optax, name)(1e-2) for name in BY_RATE},
    **{name: getattr(contrib, name)(1e-2) for name in CONTRIB_BY_RATE},
    **{name: getattr(contrib, name)() for name in WITHOUT_RATE},
    "adadelta": optax.adadelta(1.0),
    "lars": optax.lars(0.1),
    "lion": optax.lion(1e-3),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "polyak_sgd": optax.polyak_sgd(),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "sm3": optax.sm3(0.1),
    # Of higher rank it projects onto directions without any gradient, where it scales up rounding: 1e-4 after 5 steps.
    "galore": contrib.galore(1e-2, rank=2),
    "mechanize": contrib.mechanize(optax.adam(1e-2)),
    "reduce_on_plateau": optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, rtol=0.5)),
    # Says that it takes further arguments and does not; alone a step leaves them out, beside others it cannot.
    "sam": optax.GradientTransformation(
        *contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))
    ),
    "schedule_free": contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1),
    "schedule_free_sgd": contrib.schedule_free_sgd(0.1),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(1e-2)),
    "flatten": optax.flatten(optax.adam(1e-2)),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(1e-2),
}


def small(key: jax.Array) -> dict[str, Any]:
    """One matrix and one vector: each more leaf costs seconds of compiling all optimizers."""
    return {"kernel": 0.3 * jax.random.normal(key, (8, 16)), "bias": jnp.zeros(16)}


def logits(params: Any, inputs: jax.Array) -> jax.Array:
    return inputs @ params["kernel"] + params["bias"]


def side_by_side(name: str) -> Any:
    """A step that trains a copy of the small model with each optimizer; the gradient of one is that of it alone."""
    key = {one: one.replace(".", "_") for one in SIDE_BY_SIDE}
    model = jt.from_functions(
        lambda seed: {key[one]: small(seed) for one in SIDE_BY_SIDE},
        lambda params, inputs: {one: logits(params[one], inputs) for one in params},
    )
    shipped = jt.classification()

    def loss(outputs: Any, batch: Any) -> Any:
        found = {one: shipped.loss(outputs[one], batch)[:2] for one in outputs}
        return sum(total for total, _ in found.values()), next(iter(found.values()))[1], found

    optimizer = optax.partition(
        {key[one]: optimizer for one, optimizer in SIDE_BY_SIDE.items()},
        lambda params: {label: jax.tree.map(lambda _, label=label: label, part) for label, part in params.items()},
    )
    return jt.make_train_step(model, jt.Task("copies", loss), optimizer, mesh=make_mesh_of(MESHES[name]))


def run(step: Any, state: Any, steps: int = STEPS) -> tuple[Any, list[dict[str, float]]]:
    rows = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


def host(tree: Any) -> dict[str, np.ndarray]:
    def numbers(leaf: jax.Array) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return {path_name(path): numbers(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def resumed(step: Any, folder: Path) -> tuple[Any, Any, Any]:
    """The state after 3 steps, and the two after 2 more: straight on, and through a checkpoint."""
    state, _ = run(step, step.init(0), 3)
    with jt.Checkpointer(folder) as checkpointer:
        checkpointer.save(3, state, metadata={})
        sharded = {
            path_name(path): (leaf.size, leaf.addressable_shards[0].data.size)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer_state)
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        }
        on, _ = run(step, state, 2)
        again, _ = run(step, checkpointer.restore(step.abstract_state), 2)
    return sharded, host(on), host(again)


def check_sharded_and_resumed(found: tuple[Any, Any, Any], part: str) -> None:
    sharded, on, again = found
    for path, (size, local) in sharded.items():
        # Numbers per matrix, a bias, and projections of rank 2 may be on every device.
        if size > 16 and f"/{part}/" in f"/{path}/":
            assert local * 4 == size, f"{path} is not sharded over fsdp"
    for path, leaf in on.items():
        if f"/{part}/" in f"/{path}/":
            np.testing.assert_array_equal(leaf, again[path], err_msg=path)


@pytest.mark.long
def test_losses_are_those_of_one_device_and_state_is_sharded_and_resumed(tmp_path: Path) -> None:
    step, one = side_by_side("data=2,fsdp=4"), side_by_side("one device")
    alone, mesh_rows = (run(each, each.init(0))[1] for each in (one, step))
    found = resumed(step, tmp_path)
    for name in SIDE_BY_SIDE:
        part = name.replace(".", "_")
        losses = [[row[part] for row in rows] for rows in (alone, mesh_rows)]
        # Gradients are summed in another order: 1e-7 a step, which no optimizer of these raises above 2e-6.
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, err_msg=name)
        assert losses[0][-1] < losses[0][0], name
        check_sharded_and_resumed(found, part)
