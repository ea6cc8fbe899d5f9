"""The layouts that are proved equal, the models they are proved on, and a way to run one: a row is a layout."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from pydantic import TypeAdapter

from jaxtrain.config.data import DigitsData, TextData
from jaxtrain.config.model import MLPConfig, ResNetConfig, TransformerConfig
from jaxtrain.config.optimizers import AdamWConfig, OptimizerConfig, SGDConfig
from jaxtrain.config.schema import LoraConfig, Parallelism, Remat
from jaxtrain.data import Batches, open_data
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.adapters import adapt
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import classification, language_modeling
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.train.build import make_train_step
from jaxtrain.train.step import TrainStep

STEPS = 6


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh and options; an axis left out is 1."""

    degrees: dict[str, int]
    options: Parallelism


def layout(
    *, zero: int = 0, sp: bool = False, attention: str = "auto", schedule: str = "1f1b", **degrees: int
) -> Layout:
    options = Parallelism(zero=zero, sequence_parallel=sp, context_attention=attention, schedule=schedule)
    return Layout(degrees, options)


ONE = layout(data=1)
# Each axis alone or beside one that it meets in code of its own, each schedule of stages, and each stage of ZeRO.
LAYOUTS = {
    "fsdp=8": layout(fsdp=8),
    "zero=1": layout(data=8, zero=1),
    "zero=2": layout(data=8, zero=2),
    "tensor=4,data=2": layout(tensor=4, data=2),
    "tensor=2,fsdp=2,data=2": layout(tensor=2, fsdp=2, data=2),
    "zero=2,data=2,fsdp=2,tensor=2": layout(data=2, fsdp=2, tensor=2, zero=2),
    "tensor=2,fsdp=2,data=2,sequence-parallel": layout(tensor=2, fsdp=2, data=2, sp=True),
    "pipe=4,gpipe": layout(pipe=4, schedule="gpipe"),
    "pipe=4,interleaved,data=2,zero=2": layout(pipe=4, data=2, schedule="interleaved_1f1b", zero=2),
    "pipe=2,fsdp=2,tensor=2": layout(pipe=2, fsdp=2, tensor=2),
    "pipe=2,data=2,tensor=2,zero=1": layout(pipe=2, data=2, tensor=2, zero=1),
    "context=4,all_to_all": layout(context=4, attention="all_to_all"),
    "context=4,ring,data=2": layout(context=4, data=2, attention="ring"),
    "context=2,tensor=2,fsdp=2": layout(context=2, tensor=2, fsdp=2),
    "pipe=2,context=2,tensor=2": layout(pipe=2, context=2, tensor=2),
    "expert=4,data=2": layout(expert=4, data=2),
    "expert=2,tensor=2,fsdp=2": layout(expert=2, tensor=2, fsdp=2),
    "pipe=2,expert=2,data=2": layout(pipe=2, expert=2, data=2),
    "pipe=2,expert=2,tensor=2,interleaved": layout(pipe=2, expert=2, tensor=2, schedule="interleaved_1f1b"),
}


ADAMW = AdamWConfig(learning_rate=1e-3, weight_decay=0.1)
LANGUAGE, TEXT = language_modeling(), TextData()


@dataclass(frozen=True)
class Case:
    """A model with real data for it."""

    model: Callable[[str], Model]
    task: Task = LANGUAGE
    data: Any = TEXT
    batch_size: int = 32
    optimizer: OptimizerConfig = ADAMW
    clip_norm: float | None = 1.0


def transformer(remat: str, **options: Any) -> Model:
    """Llama's variants with grouped-query heads; eight layers, so that four stages can have two chunks each."""
    sizes = dict(num_layers=8, embed_dim=32, num_heads=8, num_kv_heads=4, mlp_dim=64, max_sequence_length=32)
    config = TransformerConfig(**{**sizes, **options})
    return build_model(config, input_shape=(32,), vocab_size=256, remat=Remat(policy=remat))


def digits(settings: Any) -> Callable[[str], Model]:
    return lambda remat: build_model(settings, input_shape=(8, 8, 1), num_outputs=10)


# GPT-2's variants, with dropout: the masks have to be the same on every layout too.
GPT2 = dict(position="learned", norm="layernorm", activation="gelu", bias=True, tie_embeddings=True, dropout=0.1)
RESNET = ResNetConfig(stage_blocks=(1, 3), width=16, stem="small")
CASES = {
    "transformer": Case(transformer),
    "experts": Case(lambda remat: transformer(remat, num_layers=4, experts=dict(num_experts=4, experts_per_token=2))),
    "gpt2": Case(lambda remat: transformer(remat, num_layers=4, num_kv_heads=8, **GPT2)),
    # Adapters of linear layers of both shardings, with dropout: a mask per layer, linear layer and row, whose hashes
    # are what takes long to compile.
    "adapters": Case(
        lambda remat: adapt(transformer(remat), lora=LoraConfig(rank=4, dropout=0.1, targets=("query", "down"))),
        # Gradients of A are almost 0 at first, because B is: without such an epsilon Adam makes full steps of rounding.
        optimizer=AdamWConfig(learning_rate=1e-3, weight_decay=0.1, epsilon=1e-4),
    ),
    "resnet": Case(
        *(digits(RESNET), classification(), DigitsData(), 64, SGDConfig(learning_rate=0.02, weight_decay=1e-4), None)
    ),
    "mlp": Case(digits(MLPConfig(hidden_dims=(64, 64))), classification(), DigitsData(), 64),
}


def make_mesh_of(degrees: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh over as many of the devices as the degrees make."""
    return make_mesh(**{"data": 1, **degrees}, devices=jax.devices()[: math.prod(degrees.values())])


def make_step(
    case: Case,
    where: Layout,
    accumulation: int,
    remat: str = "none",
    policy: str = "fp32",
    ema_decay: float | None = None,
) -> TrainStep:
    model = case.model(remat)
    optimizer = build_optimizer(case.optimizer, optax.constant_schedule(case.optimizer.learning_rate), axes=model.axes)
    return make_train_step(
        model,
        case.task,
        optimizer,
        mesh=make_mesh_of(where.degrees),
        policy=policy,
        accumulation_steps=accumulation,
        clip_norm=case.clip_norm,
        ema_decay=ema_decay,
        parallelism=where.options,
    )


def with_optimizer(kind: str, name: str = "transformer") -> Case:
    """A case with another optimizer, "adamw int8" with its moments in int8.

    Adafactor factors the small matrices of these models too.
    """
    kind, _, moments = kind.partition(" ")
    options = {"min_dim_size_to_factor": 16} if kind == "adafactor" else {"moments": moments} if moments else {}
    config = TypeAdapter(OptimizerConfig).validate_python({"kind": kind, "learning_rate": 1e-3, **options})
    return dataclasses.replace(CASES[name], optimizer=config)


@functools.cache
def load_batches(name: str) -> list[dict[str, np.ndarray]]:
    case = CASES[name]
    data = open_data(case.data, sequence_length=32, seed=0)
    batches = Batches(data.train, case.batch_size, seed=0, shuffle=True)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [jax.device_get(batches.load(k, dict.fromkeys(batches.spec(), whole))) for k in range(STEPS)]


@dataclass(frozen=True)
class Outcome:
    state: Any
    losses: np.ndarray
    grad_norms: np.ndarray
    params: Any
    model_state: Any


def run(
    name: str, where: Layout, accumulation: int, remat: str = "none", policy: str = "fp32", start: Any = None
) -> Outcome:
    """Train; from `start`, the first state of another run, where compiling an own one would prove nothing new."""
    step = make_step(CASES[name], where, accumulation, remat, policy)
    batches = load_batches(name)
    step.compile(batches[0])
    state = step.init(0) if start is None else jax.device_put(start, step.state_shardings)
    first = jax.device_get(dataclasses.replace(state, key=0))
    first = dataclasses.replace(first, key=jax.random.wrap_key_data(jax.device_get(jax.random.key_data(state.key))))
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append((metrics["loss"], metrics["grad_norm"]))
    losses, grad_norms = np.array(jax.device_get(found), np.float64).T
    return Outcome(first, losses, grad_norms, jax.device_get(state.params), jax.device_get(state.model_state))


@functools.cache
def reference(name: str, accumulation: int, policy: str = "fp32") -> Outcome:
    return run(name, ONE, accumulation, policy=policy)


def distance(a: Any, b: Any) -> float:
    """Norm of the difference of two trees over the norm of the second."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    difference = sum(float(np.sum(np.square(x.astype(np.float64) - y))) for x, y in pairs)
    size = sum(float(np.sum(np.square(y.astype(np.float64)))) for _, y in pairs)
    return math.sqrt(difference / size) if pairs else 0.0
