"""Paths and shapes of the parameters of the shipped models, from the config alone. No jax here.

`tests/plan/test_parameters.py` holds every shipped size to what the models themselves create.
"""

import fnmatch
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.config.models import MLPConfig, ModelConfig, ResNetConfig, TransformerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.plan.workload.record import Workload

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tensors:
    """What a model holds.

    Attributes:
        params: path -> shape.
        model_state: path -> shape, float32 (batch statistics).
        stack: top-level path of the layers that are stacked, for a model that can be pipelined.
    """

    params: Shapes
    model_state: Shapes
    stack: str | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.params.values()))


def model_tensors(config: ModelConfig, workload: Workload) -> Tensors:
    """The tensors of the model that a config describes, for the rows of a workload."""
    match config:
        case TransformerConfig():
            assert workload.vocab_size is not None
            return Tensors(_transformer(config, workload.vocab_size), {}, "blocks")
        case ResNetConfig():
            assert workload.num_outputs is not None
            return _resnet(config, workload.input_shape[-1], workload.num_outputs)
        case MLPConfig():
            assert workload.num_outputs is not None
            return Tensors(_mlp(config, math.prod(workload.input_shape), workload.num_outputs), {})


def _transformer(config: TransformerConfig, vocab_size: int) -> Shapes:
    layers, width, heads = config.num_layers, config.embed_dim, config.num_heads
    groups = config.kv_heads
    head_dim = config.head_width
    hidden = config.mlp_width

    def norm(path: str, *lead: int) -> Shapes:
        bias = config.bias and config.norm == "layernorm"
        return {f"{path}/{name}": (*lead, width) for name in (["bias"] if bias else []) + ["scale"]}

    def linear(path: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Shapes:
        shapes: Shapes = {f"{path}/kernel": (layers, *inputs, *outputs)}
        return shapes | ({f"{path}/bias": (layers, *outputs)} if config.bias else {})

    shapes: Shapes = {"embedding": (vocab_size, width)}
    if config.position == "learned":
        shapes["positions"] = (config.max_sequence_length, width)
    shapes |= norm("blocks/attention_norm", layers) | norm("blocks/mlp_norm", layers)
    shapes |= linear("blocks/attention/query", (width,), (heads, head_dim))
    shapes |= linear("blocks/attention/key", (width,), (groups, head_dim))
    shapes |= linear("blocks/attention/value", (width,), (groups, head_dim))
    shapes |= linear("blocks/attention/output", (heads, head_dim), (width,))
    experts: tuple[int, ...] = ()
    if config.experts is not None:
        experts = (config.experts.num_experts,)
        shapes["blocks/mlp/router/kernel"] = (layers, width, *experts)
    shapes |= linear("blocks/mlp/up", (*experts, width), (hidden,))
    if config.activation == "swiglu":
        shapes |= linear("blocks/mlp/gate", (*experts, width), (hidden,))
    shapes |= linear("blocks/mlp/down", (*experts, hidden), (width,))
    shapes |= norm("output_norm")
    if not config.tie_embeddings:
        shapes["output"] = (width, vocab_size)
    return shapes


def _resnet(config: ResNetConfig, channels: int, num_classes: int) -> Tensors:
    params: Shapes = {}
    state: Shapes = {}

    def conv(path: str, size: int, inputs: int, outputs: int, lead: tuple[int, ...]) -> None:
        params[f"{path}/kernel"] = (*lead, size, size, inputs, outputs)

    def norm(path: str, width: int, lead: tuple[int, ...]) -> None:
        for name in ("scale", "bias"):
            params[f"{path}/{name}"] = (*lead, width)
        for name in ("mean", "variance"):
            state[f"{path}/{name}"] = (*lead, width)

    def block(path: str, inputs: int, width: int, *, projects: bool, lead: tuple[int, ...] = ()) -> None:
        outputs = 4 * width if config.bottleneck else width
        widths = [inputs, width, width, outputs] if config.bottleneck else [inputs, width, outputs]
        for index, size in enumerate([1, 3, 1] if config.bottleneck else [3, 3]):
            conv(f"{path}/convs/{index}", size, widths[index], widths[index + 1], lead)
            norm(f"{path}/norms/{index}", widths[index + 1], lead)
        if projects:
            conv(f"{path}/shortcut", 1, inputs, outputs, lead)
            norm(f"{path}/shortcut_norm", outputs, lead)

    conv("stem", 7 if config.stem == "imagenet" else 3, channels, config.width, ())
    norm("stem_norm", config.width, ())
    inputs = config.width
    for stage, count in enumerate(config.stage_blocks):
        width = config.width * 2**stage
        outputs = 4 * width if config.bottleneck else width
        block(f"stage{stage}_first", inputs, width, projects=stage > 0 or inputs != outputs)
        if count > 1:
            block(f"stage{stage}_rest", outputs, width, projects=False, lead=(count - 1,))
        inputs = outputs
    params["head_kernel"], params["head_bias"] = (inputs, num_classes), (num_classes,)
    return Tensors(params, state)


def _mlp(config: MLPConfig, num_inputs: int, num_outputs: int) -> Shapes:
    shapes: Shapes = {}
    widths = (num_inputs, *config.hidden_dims)
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"layers/{index}/kernel": (inputs, outputs), f"layers/{index}/bias": (outputs,)}
    return shapes | {"output/kernel": (widths[-1], num_outputs), "output/bias": (num_outputs,)}


def trained_paths(shapes: Mapping[str, tuple[int, ...]], freeze: tuple[str, ...]) -> set[str] | None:
    """The parameters that a config trains; None: all.

    Raises:
        ConfigError: patterns that match all of them.
    """
    frozen = frozen_paths(shapes, freeze)
    if frozen and len(frozen) == len(shapes):
        raise ConfigError("optimizer.freeze matches every parameter; leave one to train")
    return {*shapes} - frozen if frozen else None


def frozen_paths(shapes: Mapping[str, tuple[int, ...]], freeze: tuple[str, ...]) -> set[str]:
    """The parameters that a config's `optimizer.freeze` keeps as they are."""
    return {path for path in shapes if any(fnmatch.fnmatchcase(path, pattern) for pattern in freeze)}
