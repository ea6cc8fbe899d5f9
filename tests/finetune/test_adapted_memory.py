"""What adapted layers keep for their backward pass, quantized bases without floats, and programs compiled once."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import jaxtrain as jt
from jaxtrain.layout.sharding import path_name

MODEL: dict[str, Any] = dict(
    kind="transformer", num_layers=3, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=40, activation="swiglu"
)
ROWS, LENGTH, VOCABULARY, RANK = 2, 11, 64, 2


def step_of(base: str | None) -> jt.TrainStep:
    model = jt.build_model(MODEL, input_shape=(LENGTH,), vocab_size=VOCABULARY)
    adapted = jt.adapt(model, lora=jt.LoraConfig(rank=RANK), base=base)
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    return jt.make_train_step(adapted, jt.language_modeling(), optax.sgd(0.1), mesh=mesh)


def batch() -> dict[str, np.ndarray]:
    tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) % VOCABULARY
    return {"inputs": tokens, "targets": tokens}


def stacked_by_the_forward_scan(step: jt.TrainStep) -> list[tuple[int, ...]]:
    """Shapes, without the dim of the layers, of what the scan over the layers keeps for the backward pass."""
    found: list[tuple[int, ...]] = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            params = equation.params
            is_stack = equation.primitive.name == "scan" and params["length"] == MODEL["num_layers"]
            if is_stack and not params["reverse"]:
                shapes = [one.aval.shape for one in equation.outvars]
                # What the layers hand on has the batch first, which is of another size.
                found.extend(shape[1:] for shape in shapes if shape[:1] == (MODEL["num_layers"],))
                continue
            for inner in jax.tree.leaves(list(params.values())):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    visit(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)

    visit(step.trace(batch()).jaxpr)
    return found


@pytest.mark.parametrize("base", [None, pytest.param("nf4", marks=pytest.mark.long)])
def test_kernels_are_not_kept_and_inputs_are_kept_once(base: str | None) -> None:
    step = step_of(base)
    kept = stacked_by_the_forward_scan(step)
    assert kept
    params = jax.tree_util.tree_leaves_with_path(step.abstract_state.params["blocks"])
    sizes = {path_name(path): leaf.size // MODEL["num_layers"] for path, leaf in params}
    large = {size for path, size in sizes.items() if path.endswith(("base", "codes"))}
    activations = {ROWS * LENGTH * width for width in (16, 8, 40)}
    assert not large & activations, "sizes that tell kernels from activations"
    assert not [shape for shape in kept if np.prod(shape) in large]
    # Both factors of the MLP's product, and its result, which the layer after it reads.
    assert sum(np.prod(shape) == ROWS * LENGTH * MODEL["mlp_dim"] for shape in kept) == 3


SIZES: dict[str, Any] = {"kind": "transformer", "embed_dim": 64, "num_heads": 4, "mlp_dim": 128}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 17))
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def above_a_base(base: str, *, layers: int = 2, remat: str = "none", mesh: Any = None, **sizes: int) -> jt.TrainStep:
    config = {**SIZES, **sizes, "num_layers": layers}
    model = jt.build_model(config, input_shape=(16,), vocab_size=64, remat=jt.Remat(policy=remat))
    adapted = jt.adapt(model, lora=jt.LoraConfig(rank=8), base=base)
    mesh = mesh or jt.make_mesh(devices=jax.devices()[:1])
    return jt.make_train_step(adapted, jt.language_modeling(), optax.adam(1e-2), mesh=mesh)


def losses(step: jt.TrainStep) -> np.ndarray:
    state, found = step.init(0), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "degrees", "remat"),
    [("nf4", {"pipe": 2, "fsdp": 2, "tensor": 2}, "none"), ("int8", {"fsdp": 8}, "full")],
    ids=["nf4: pipe, fsdp, tensor", "int8: fsdp, full remat"],
)
def test_every_layout_equals_one_device(base: str, degrees: dict[str, int], remat: str) -> None:
    """To 1e-5: float32, in other orders of sums; the integers are the same."""
    alone = losses(above_a_base(base))
    np.testing.assert_allclose(losses(above_a_base(base, mesh=jt.make_mesh(**degrees), remat=remat)), alone, rtol=1e-5)
    assert np.abs(np.diff(alone)).min() > 1e-3, "a run that learns nothing would prove nothing"


@pytest.mark.long
@pytest.mark.parametrize(("base", "remat"), [("nf4", "none"), ("nf4", "full"), ("int8", "none")])
def test_the_floats_of_a_base_are_never_kept(base: str, remat: str) -> None:
    """Of 12 layers the compiled step holds less than the floats of 6 beside what it is given, for a batch of a row."""
    layers = 12
    step = above_a_base(base, layers=layers, remat=remat, embed_dim=256, mlp_dim=1024)
    compiled = step.compile({name: values[:1] for name, values in BATCH.items()})
    # Four kernels of attention and three of the MLP.
    floats = 4 * layers * (4 * 256**2 + 3 * 256 * 1024)
    assert compiled.memory_analysis().temp_size_in_bytes < floats / 2


def test_a_first_call_compiles_its_program_once() -> None:
    model = jt.build_model({"kind": "mlp", "hidden_dims": [4]}, input_shape=(3,), num_outputs=2)
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), mesh=mesh)
    state, rows = step.init(0), step.place({"inputs": np.ones((2, 3), np.float32), "targets": np.arange(2)})
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.block_until_ready((state, rows))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            state, _metrics = step(state, rows)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1
