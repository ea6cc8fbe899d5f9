"""The model contract: a frozen record of pure functions over plain nested dicts of arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from jaxtrain.config.schema import LoraConfig, Remat
from jaxtrain.layout.gather import gather_after
from jaxtrain.layout.keys import shard_key
from jaxtrain.layout.mesh import parameters_text
from jaxtrain.layout.rules import check_axes
from jaxtrain.layout.scatter import hide_stack_sums, without_parts
from jaxtrain.layout.sharding import path_name
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, compute_logits

LOW_RANK = ("lora_a", "lora_b")
"""Last parts of the paths of adapters."""

Params = dict[str, Any]
ModelState = dict[str, Any]


class Apply(Protocol):
    """`apply(params, model_state, inputs, *, key, train) -> (outputs, model_state)`."""

    def __call__(
        self, params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]: ...


class Embed(Protocol):
    """`embed(params, inputs, *, key, train) -> carry`: what the first layer takes; `params` without the stack."""

    def __call__(self, params: Params, inputs: Any, /, *, key: jax.Array | None, train: bool) -> Any: ...


class Layers(Protocol):
    """`layers(stack, carry, inputs, *, first_layer, key, train) -> carry`: some of the layers, in order.

    `stack` holds consecutive layers of the stacked parameters, the first of which has index `first_layer` (int32 []);
    random numbers of a layer depend on its index alone. The carry keeps its shapes and dtypes.
    """

    def __call__(
        self,
        stack: Params,
        carry: Any,
        inputs: Any,
        /,
        *,
        first_layer: jax.Array | int,
        key: jax.Array | None,
        train: bool,
    ) -> Any: ...


class Head(Protocol):
    """`head(params, carry, *, train) -> outputs`; `params` without the stack.

    The outputs may hold `DeferredLogits` where logits belong: a task that takes them never has all logits in memory.
    """

    def __call__(self, params: Params, carry: Any, /, *, train: bool) -> Any: ...


@dataclass(frozen=True)
class DrawsByRow:
    """Marks a function of a model whose random numbers follow from a row's number in the batch over all devices.

    Such a function (`call` of `from_nnx`, `embed` and `block` of `from_stages`, `Model.apply`, the functions of
    `Parts`) gets the same key on every shard of `data`, and what it draws by row is the same on every mesh and with
    every number of microbatches. Every other one gets a key of the microbatch and of the shard, where the step works
    shard by shard. `jt.dropout` draws by row; `jax.random` with the key itself draws for the microbatch.

    Attributes:
        function: what is called.

    Example:
        >>> def call(module, inputs, key, train):
        ...     return jt.dropout(module(inputs), 0.1, key if train else None)
        >>> model = jt.from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs), call=jt.DrawsByRow(call))
    """

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Parts:
    """A model partitioned for a pipeline: an embedding, a stack of equal layers, and a head.

    Attributes:
        stack: top-level key of params whose leaves have a leading dim [num_layers].
        num_layers: of the stack.
        embed, layers, head: pure functions; see their protocols.

    Example:
        >>> def layers(stack, carry, inputs, *, first_layer, key, train):
        ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), carry, stack["w"])[0]
        >>> parts = jt.Parts(
        ...     stack="blocks",
        ...     num_layers=2,
        ...     embed=lambda params, inputs, *, key, train: inputs,
        ...     layers=layers,
        ...     head=lambda params, carry, *, train: carry @ params["head"],
        ... )
        >>> init = lambda key: {"blocks": {"w": jnp.ones((2, 4, 4))}, "head": jnp.ones((4, 3))}
        >>> jt.count_parameters(jt.from_functions(init, parts=parts))
        44
    """

    stack: str
    num_layers: int
    embed: Embed
    layers: Layers
    head: Head


NOWHERE = 2**30
"""A position that no decoder's cache has: a token there is fed, and no other one sees it."""


@dataclass(frozen=True)
class Decoder:
    """How a model generates: a cache and a function that extends it.

    Attributes:
        init_cache: (batch, length, dtype) -> cache tree with keys and values for `length` positions.
        decode: (params, tokens_BT, positions_BT, cache) -> (logits_BTV float32, cache). Writes the T tokens at their
            positions and lets each see what stands at or before it; what is beyond `length` is not written.
        max_length: positions the model has.
        encode: (params, prompts_BP, lengths_B, cache) -> cache, of a model that reads its prompt with an encoder; to
            be called before the first `decode`, with prompts padded on the right. None: `decode` reads the prompt.
        start_token: what `decode` gets at position 0 of a model with an encoder; what it writes is the output alone.
        prefill: (params, prompts_BP, lengths_B, cache) -> (logits_BV, cache): `decode` of whole prompts, padded on the
            right, that computes the float32 logits of the last token of each alone. None: `decode` computes all.
        short_length: longest cache whose positions are those of short texts (longrope); None: all lengths are alike.
        deferred: `decode` that gives `DeferredLogits` in place of logits, for callers that need few of them. None:
            `decode` computes all.
        keeps_positions: whether a cache has what every position wrote; False: one state per text, to which tokens are
            added in their order and which a token at position 0 begins again.
    """

    init_cache: Callable[[int, int, Any], Any]
    decode: Callable[[Params, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    max_length: int
    encode: Callable[[Params, jax.Array, jax.Array, Any], Any] | None = None
    start_token: int = 0
    short_length: int | None = None
    prefill: Callable[[Params, jax.Array, jax.Array, Any], tuple[jax.Array, Any]] | None = None
    deferred: Callable[[Params, jax.Array, jax.Array, Any], tuple[DeferredLogits, Any]] | None = None
    keeps_positions: bool = True


@dataclass(frozen=True)
class Model:
    """What the step, the planner and the checkpoints know of a model.

    Attributes:
        name: for people.
        init: key -> (params, model_state) in fp32. It is traced under `jit` with output shardings, so every parameter
            is created in its shards.
        apply: (params, model_state, inputs, *, key, train) -> (outputs, model_state). `model_state` holds what
            changes without a gradient (batch statistics); params come in the compute dtype.
        axes: parameter path (or pattern with `*`) -> logical axis names, one for each dim; paths left out are sharded
            by the default rule.
        gathers_itself: sub-trees of params ("blocks") whose shards `apply` gathers itself, one layer at a time; the
            step gathers all others before `apply`.
        decoder: generation, for models that have it.
        parts: the model partitioned for a pipeline; None: it runs with parallel.pipe=1 only.
        has_experts: whether it has parameters that the `expert` axis can shard.
        score_bias_step: how far a step moves each parameter `score_bias` against the load of its expert, whatever the
            optimizer; None: it has none.
        linears: path of each kernel that `adapt` and `quantize` take -> (how many of its last dims are inputs, how
            many are outputs).
        vocab_size: number of ids that integer inputs (or their entry `tokens`) may hold; None: not known, or no ids.
        num_outputs: size of the last dimension of the outputs (or of their `logits`); None: found by tracing.
        remat: the remat policy that the model was built with; None: none.
        adapted: what `adapt` made of its linear layers; None: nothing.
        convolutional: whether its steps spend their time on convolutions; a step on several CPU devices then takes
            options of the compiler that steps on one device take.

    Example:
        >>> def init(key):
        ...     return {"w": jax.random.normal(key, (4, 3))}, {"count": jnp.int32(0)}
        >>> def apply(params, model_state, inputs, *, key, train):
        ...     return inputs @ params["w"], {"count": model_state["count"] + 1}
        >>> model = jt.Model("counts", init, apply, axes={"w": ("embed", "mlp")})
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3))
    """

    name: str
    init: Callable[[jax.Array], tuple[Params, ModelState]]
    apply: Apply
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    gathers_itself: tuple[str, ...] = ()
    decoder: Decoder | None = None
    parts: Parts | None = None
    has_experts: bool = False
    score_bias_step: float | None = None
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    vocab_size: int | None = None
    num_outputs: int | None = None
    remat: Remat | None = None
    adapted: "Adapted | None" = None
    convolutional: bool = False

    def __post_init__(self) -> None:
        check_axes(self.axes, what=f"axes of the model {self.name}")

    def __repr__(self) -> str:
        return f"Model {self.name!r}: {parameters_text(drawn_shapes(self.init)[0])}"


@dataclass(frozen=True)
class Adapted:
    """How the linear layers of a model differ from those of the model that it was made of; see `adapt`."""

    original: Model  # the model without adapters, with floating-point kernels
    lora: LoraConfig | None  # settings of the adapters; None: there are none, only quantized kernels
    base: str | None  # format of the kernels below the adapters: "int8" or "nf4"; None: floats
    double_quantization: bool  # whether the scales of nf4 kernels are quantized too
    targets: tuple[str, ...]  # paths of the kernels that have an adapter, in the order of the parameters
    trains: Callable[[str], bool]  # parameter path -> whether it is trained unless something else is asked for


class ComputesLogits:
    """An `Apply` that gives logits, and `deferred` outputs where a step's task takes them.

    The two are one object: a model whose `apply` somebody wraps is never applied without the wrapper.
    """

    deferred: Any  # like the object itself, with `DeferredLogits` in place of logits

    def __call__(
        self, params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        outputs, model_state = self.deferred(params, model_state, inputs, key=key, train=train)
        return compute_logits(outputs), model_state


@dataclass(frozen=True)
class PartsApply(ComputesLogits):
    """The model as the composition of its parts; it has no model_state."""

    parts: Parts

    def deferred(
        self, params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        parts = self.parts
        rest = {name: value for name, value in params.items() if name != parts.stack}
        with hide_stack_sums():
            carry = parts.embed(without_parts(rest), inputs, key=key_for(parts.embed, key), train=train)
        layers_key = key_for(parts.layers, key)
        carry = parts.layers(params[parts.stack], carry, inputs, first_layer=0, key=layers_key, train=train)
        carry, rest = gather_after(carry, rest)
        return parts.head(rest, carry, train=train), model_state


@dataclass(frozen=True)
class DefersLogits(ComputesLogits):
    """A model without parts whose outputs hold `DeferredLogits`, and which draws by row."""

    deferred: Apply


def by_row_as(function: Callable[..., Any], given: Callable[..., Any]) -> Any:
    """Mark a function as `DrawsByRow` if the one that it was made of (`given`) is."""
    return DrawsByRow(function) if isinstance(given, DrawsByRow) else function


def key_for(function: Callable[..., Any], key: jax.Array | None) -> jax.Array | None:
    """Return the key that `apply` of a model, or `embed` or `layers` of its parts, gets: see `DrawsByRow`."""
    # The parts get theirs one by one.
    return key if key is None or isinstance(function, DrawsByRow | ComputesLogits) else shard_key(key)


def drawn_shapes(init: Callable[[jax.Array], Any]) -> tuple[Params, ModelState]:
    """Return what an init gives, as shapes; nothing is allocated."""
    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))


def parameter_shapes(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Return path -> shape and dtype of every parameter; nothing is allocated."""
    leaves = jax.tree_util.tree_leaves_with_path(drawn_shapes(model.init)[0])
    return {path_name(path): leaf for path, leaf in leaves}


def count_parameters(model: Model) -> int:
    """Count the parameters, from shapes alone: nothing is allocated.

    Quantized kernels count as the floats that they stand for.

    Example:
        >>> jt.count_parameters(model)
        15
    """
    if model.adapted is None:
        return sum(shape.size for shape in parameter_shapes(model).values())
    factors = (leaf.size for path, leaf in parameter_shapes(model).items() if path.rsplit("/", 1)[-1] in LOW_RANK)
    return count_parameters(model.adapted.original) + sum(factors)
