"""Groups of parameters by path pattern: each is updated exactly as its own optimizer would update it alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter

import jaxtrain as jt
from jaxtrain.config.load import load_config
from jaxtrain.config.optimizers import OptimizerConfig
from jaxtrain.optim.optimizers import build_optimizer

RATE = optax.linear_schedule(0.1, 0.01, 5)
RNG = np.random.default_rng(0)
# Large enough for moments in 8 bits and in bfloat16.
PARAMS: Any = {
    "body": {"kernel": jnp.asarray(RNG.normal(size=(64, 64)), jnp.float32), "bias": jnp.ones(64)},
    "head": {"kernel": jnp.asarray(RNG.normal(size=(64, 96)), jnp.float32), "bias": jnp.ones(96)},
}
GRADIENTS = [jax.tree.map(lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype), PARAMS) for _ in range(3)]


def build(**settings: Any) -> Any:
    config = TypeAdapter(OptimizerConfig).validate_python(settings)
    factor = settings.get("learning_rate", 1.0)
    return build_optimizer(config, lambda count: factor * RATE(count), axes={})


@partial(jax.jit, static_argnums=0)
def run(optimizer: Any, params: Any, gradients: list[Any]) -> Any:
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


# main optimizer, groups, what each part of the model is updated by alone (learning_rate: multiple of the schedule)
ADAMW = dict(kind="adamw", weight_decay=0.1)
SGD = dict(kind="sgd", momentum=0.5)
CASES = {
    "learning rate and weight decay": (
        ADAMW,
        [dict(match=["head/*"], learning_rate_factor=16, weight_decay=0)],
        {"head": dict(kind="adamw", learning_rate=16.0), "body": ADAMW},
    ),
    "all three, int8 moments beside": (
        dict(kind="adamw", moments="int8"),
        [dict(match=["*/bias", "head/*"], learning_rate_factor=0.5, weight_decay=0.3, optimizer=SGD)],
        {
            "head": dict(**SGD, weight_decay=0.3, learning_rate=0.5),
            "body/bias": dict(**SGD, weight_decay=0.3, learning_rate=0.5),
            "body/kernel": dict(kind="adamw", moments="int8"),
        },
    ),
    "the first that matches, the second left empty": (
        ADAMW,
        [dict(match=["head/*"], optimizer=dict(kind="lion")), dict(match=["head/kernel"], optimizer=SGD)],
        {"head": dict(kind="lion", weight_decay=0.1), "body": ADAMW},
    ),
}


def part(tree: Any, path: str) -> Any:
    """The tree of one part: rounding of moments draws random numbers by the number of an array in its own tree."""

    def keep(at: jax.tree_util.KeyPath, leaf: Any) -> Any:
        name = "/".join(str(one.key) for one in at)
        return leaf if name == path or name.startswith(f"{path}/") else None

    return jax.tree_util.tree_map_with_path(keep, tree)


@pytest.mark.parametrize(("main", "groups", "alone"), CASES.values(), ids=CASES)
def test_each_group_is_updated_as_alone(main: Any, groups: Any, alone: Any) -> None:
    found = run(build(**main, groups=groups), PARAMS, GRADIENTS)
    for path, settings in alone.items():
        wanted = run(build(**settings), part(PARAMS, path), [part(gradient, path) for gradient in GRADIENTS])
        # The same operations, fused differently: a few roundings of fp32 on numbers near 1.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), part(found, path), wanted)


def test_a_wrong_group_is_one_line() -> None:
    def state_of(groups: str) -> Any:
        words = [f"optimizer.groups={groups}", "optimizer.freeze=[embedding]", "model.tie_embeddings=false"]
        config = load_config("quickstart", overrides=words).config
        return jt.build_step(config, input_shape=(16,), vocab_size=32, devices=jax.devices()[:1]).abstract_state

    with pytest.raises(jt.ConfigError, match=r"groups\.0\.match: 'block/mlp/\*' .* the nearest are blocks/mlp/"):
        state_of("[{match: ['block/mlp/*']}]")
    with pytest.raises(jt.ConfigError, match=r"groups\.1\.match: 'embedding' matches no parameter"):
        state_of("[{match: ['*']}, {match: [embedding]}]")
