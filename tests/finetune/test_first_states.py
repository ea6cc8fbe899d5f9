"""States at step 0 over given parameters: what was read is in the state without a copy, what a user gave is copied."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.runtime.tree import paths_of
from jaxtrain.train import step as step_module
from jaxtrain.train.start import Start

GROUP: dict[str, Any] = {"kind": "transformer", "embed_dim": 64, "num_heads": 4, "mlp_dim": 64, "num_layers": 1}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17))
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
DEGREES = {"one device": {"data": 1}, "fsdp=4, tensor=2": {"fsdp": 4, "tensor": 2}}


def model() -> jt.Model:
    return jt.build_model(GROUP, input_shape=(16,), vocab_size=64)


def step_of(made: jt.Model, layout: str, **options: Any) -> jt.TrainStep:
    sizes = DEGREES[layout]
    mesh = jt.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    # Of a model this small, factors are more than the usual 2%.
    options = {
        "optimizer": optax.adam(1e-2),
        "mesh": mesh,
        "parallelism": jt.Parallelism(max_replicated_fraction=0.1),
        **options,
    }
    return jt.make_train_step(made, jt.language_modeling(), **options)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same parameters as a published folder, as a run and as a tree."""
    place = tmp_path_factory.mktemp("given")
    state = step_of(model(), "one device").init(3)
    with jt.Checkpointer(place / "run" / "checkpoints") as checkpointer:
        checkpointer.save(1, state, metadata={})
    folder = jt.save_pretrained(place / "folder", state.params, model=GROUP | {"vocab_size": 64})
    return {"folder": folder, "run": place / "run", "tree": state.params}


def bits(tree: Any) -> dict[str, Any]:
    def one(leaf: jax.Array) -> tuple[Any, str, bytes]:
        plain = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return leaf.sharding, str(leaf.dtype), np.asarray(plain).tobytes()

    return {path: one(leaf) for path, leaf in paths_of(tree).items()}


long = pytest.mark.long
LORA = jt.LoraConfig(rank=2)
AVERAGED = {"ema_decay": 0.9, "optimizer": jt.lookahead(optax.adam(1e-2))}
CASES = [
    pytest.param("tree", {"lora": LORA}, {}, "fsdp=4, tensor=2", id="tree, floats"),
    pytest.param("tree", {"lora": LORA, "base": "int8"}, {}, "one device", id="tree, int8", marks=long),
    pytest.param("folder", {"lora": LORA, "base": "nf4"}, {}, "fsdp=4, tensor=2", id="folder, nf4", marks=long),
    pytest.param("run", {"lora": LORA}, {"policy": "bf16"}, "one device", id="run, bfloat16", marks=long),
    pytest.param("folder", None, AVERAGED, "fsdp=4, tensor=2", id="folder, all trained, with averages", marks=long),
]


@pytest.mark.long
@pytest.mark.parametrize(("source", "adapted", "options", "layout"), CASES)
def test_the_first_state_has_what_was_read_and_copies_of_what_was_given(
    source: str,
    adapted: dict[str, Any] | None,
    options: dict[str, Any],
    layout: str,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, the state is that of a program that takes and returns all parameters."""
    step = step_of(model() if adapted is None else jt.adapt(model(), **adapted), layout, **options)
    starts: list[Start] = []

    def accept(*arguments: Any, **named: Any) -> Start:
        starts.append(accept_start(*arguments, **named))
        return starts[-1]

    accept_start = step_module.accept_start
    monkeypatch.setattr(step_module, "accept_start", accept)
    state = step.init(5, params=given[source])
    [start] = starts
    copied = step._first_state(jax.random.key(5), dataclasses.replace(start, ours=frozenset()))
    assert bits(state) == bits(copied)

    read, held = paths_of(start.params), paths_of(state.params)
    trains = step.program.settings.trainable or (lambda path: True)
    stored = paths_of(step.abstract_state.params)
    same = {path for path, leaf in read.items() if held[path] is leaf}
    # Kernels that are quantized here are no arrays of the user.
    fresh = {path for path in read if source != "tree" or "/base/" in path}
    assert same == {path for path in fresh if not trains(path) or read[path].dtype == stored[path].dtype}
    if source != "tree":
        assert same
        return
    assert bool(same) == bool(adapted and "base" in adapted)
    before = bits(given["tree"])
    step(state, BATCH)
    # A step takes over the arrays of its state; those of the user stay.
    assert bits(given["tree"]) == before
