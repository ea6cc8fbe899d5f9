"""What one device sends in one step, by mesh axis, and which axes cross the network between islands. No jax here.

Ring algorithms: a device sends (n - 1) / n of the whole.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtrain.config.model import ResNetConfig
from jaxtrain.config.schema import AXES
from jaxtrain.layout.rules import stage_over_data
from jaxtrain.models.shipped.shapes import Stack
from jaxtrain.ops.attention.rules import AttentionForm
from jaxtrain.plan.attention import attention_forms, context_way
from jaxtrain.plan.experts import exchanged_bytes
from jaxtrain.plan.state import Parameter, local_size
from jaxtrain.plan.step import DeviceStep
from jaxtrain.plan.targets import Target


@dataclass(frozen=True)
class Sent:
    """Bytes that one device sends over one axis in one step."""

    axis: str
    bytes: float
    kind: str


def crossing(degrees: Mapping[str, int], target: Target) -> dict[str, int]:
    """Axes whose neighbours sit in different islands, with how many of each share one.

    As `layout/mesh.py` deals islands to the outermost axes.
    """
    islands, rest = divmod(math.prod(degrees.values()), target.hardware.island)
    crossed, inside = {}, 1
    if not rest:
        for axis in AXES:
            across = math.gcd(degrees[axis], islands)
            islands //= across
            if across > 1:
                crossed[axis] = degrees[axis] // across
        return crossed
    # Islands of different sizes fit no shape: devices fill it in their order.
    for axis in reversed(AXES):
        if degrees[axis] > 1 and inside * degrees[axis] > target.hardware.island:
            crossed[axis] = max(1, target.hardware.island // inside)
        inside *= degrees[axis]
    return crossed


def traffic(step: DeviceStep) -> list[Sent]:
    """What one device sends in one step, by axis."""
    config, degrees, size, schedule = step.config, step.degrees, step.itemsize, step.schedule
    # A stage of a pipeline keeps its inputs only, and runs forward once more before its backward.
    forwards = 1 if schedule is None else 2
    sent: list[Sent] = []

    def share(axis: str) -> float:
        return (degrees[axis] - 1) / degrees[axis]

    def without(one: Parameter, *axes: str) -> int:
        """Elements of a parameter that a device has once these axes are gathered."""
        return local_size(one.shape, one.entries, {**degrees, **dict.fromkeys(axes, 1)})

    zero = stage_over_data(config.parallel.zero)
    if degrees["data"] > 1:
        # Batch statistics are of all shards, and so is the gradient of each microbatch.
        times = step.microbatches if zero == 2 or isinstance(config.model, ResNetConfig) else 1
        whole = sum(without(one) for one in step.trained)
        # Sums over microbatches are float32, gradients of one batch come in the compute dtype. A reduction is a
        # reduce-scatter and an all-gather; ZeRO gathers parameters in the compute dtype instead of gradients.
        gradients = 4 if step.microbatches > 1 else size
        volume = whole * (gradients * times + (size if zero else gradients * times)) * share("data")
        sent.append(Sent("data", volume, "gradients" if zero == 0 else "gradients, parameters"))
    if degrees["fsdp"] > 1:
        # Kernels in fewer bits are gathered as they are stored.
        whole = sum(min(size, one.itemsize) * without(one, "fsdp") for one in step.placed)
        scattered = size * sum(without(one, "fsdp") for one in step.trained)
        # Gathered for every forward pass and for the backward, whose gradients are scattered.
        passes = forwards + 1 + (config.remat.policy == "sqrt")
        volume = step.microbatches * (passes * whole + scattered) * share("fsdp")
        sent.append(Sent("fsdp", volume, f"parameters {'twice' if forwards == 1 else '3 times'}, gradients"))

    def summed(axis: str) -> float:
        """Sums over an axis of the gradients of parameters that are not sharded over it, once per microbatch."""
        whole = [one for one in step.trained if not one.is_over(axis)]
        return 2 * step.microbatches * size * sum(without(one) for one in whole) * share(axis)

    for stack in () if step.structure is None else step.structure.stacks:
        sent += _stack_traffic(step, stack, summed)
    if schedule is not None:
        stages, chunks = schedule.num_stages, schedule.num_chunks
        # Parameters outside the stack are gathered once a step, and their gradients summed in float32; chunks that lie
        # on another stage than the one that runs them go there and back.
        outside = sum((size + 8 * one.trained) * without(one, "pipe") for one in step.placed if not one.stacked)
        dealt = sum((size + 4 * one.trained) * without(one) for one in step.placed if one.stacked)
        elsewhere = sum(c % stages != c // chunks for c in range(stages * chunks)) / (stages * chunks)
        sent.append(Sent("pipe", outside * share("pipe") + dealt * elsewhere, "parameters, gradients"))
    return sent


def _stack_traffic(step: DeviceStep, stack: Stack, summed: Callable[[str], float]) -> list[Sent]:
    """What one device sends for a stack of transformer blocks.

    `summed` gives the bytes of the sums over an axis of gradients of parameters that are not sharded over it.
    """
    config, degrees, size, schedule = step.config, step.degrees, step.itemsize, step.schedule
    forwards = 1 if schedule is None else 2
    sent: list[Sent] = []
    model, label, tokens = stack.blocks, stack.label, step.tokens(stack)
    stream = size * tokens * model.embed_dim
    layers = model.num_layers / degrees["pipe"] * step.microbatches
    again = forwards + {"full": 1, "sqrt": 2}.get(config.remat.policy, 0)
    if degrees["tensor"] > 1:
        # After attention and after the MLP an all-reduce, forward and backward, and again where recomputed; one more
        # after cross-attention.
        sums = 3 if stack.memory_length is not None else 2
        count = sums * again + sums
        volume = layers * count * 2 * stream * (degrees["tensor"] - 1) / degrees["tensor"]
        sent.append(Sent("tensor", volume, f"{label}residual stream, {count} all-reduces a layer"))
    if degrees["context"] > 1:
        of_form = [
            count * _attention_traffic(step, stack, form, again) for form, count in attention_forms(model).items()
        ]
        volume = layers * sum(of_form) / model.num_layers
        # Gradients of parameters are summed once, with the first stack.
        volume += 0.0 if label and not label.startswith("encoder") else summed("context")
        sent.append(Sent("context", volume, "keys, values, gradients of all parameters"))
    if degrees["expert"] > 1 and model.experts is not None:
        volume = layers * exchanged_bytes(config, model, tokens, size, degrees, forwards)
        kind = "tokens to experts and back, gradients of other parameters"
        sent.append(Sent("expert", volume + summed("expert"), kind))
    if schedule is not None:
        # Under 1F1B stages exchange in every tick.
        ticks = schedule.num_ticks if schedule.name == "1f1b" else step.microbatches * schedule.num_chunks
        sent.append(Sent("pipe", 2 * ticks * stream, "activations, their gradients"))
    return sent


def _attention_traffic(step: DeviceStep, stack: Stack, form: AttentionForm, forwards: int) -> float:
    """Bytes that one device sends over `context` for the attention of one layer and microbatch.

    `forwards` are forward passes, those that are run again included.
    """
    model, degrees = stack.blocks, step.degrees
    heads, groups, others = model.num_heads, model.kv_heads, degrees["context"] - 1
    head_bytes = step.tokens(stack) * step.itemsize * model.head_width / degrees["tensor"]
    match context_way(step.config, model, form):
        case "all_to_all":
            # Queries, keys and values to the devices of their heads, and outputs back; the gradients go the same ways.
            return (forwards + 1) * 2 * (heads + groups) * head_bytes * others / degrees["context"]
        case "gather":
            return (forwards + 1) * 2 * groups * head_bytes * others
        case _:
            # Keys and values go round forward and backward, where their gradients go all the way in float32. Under
            # causal attention all four change their order before and after (of two devices each has half in place).
            zig_zag = 2 * (heads + groups) * (0.5 if others == 1 else 1) if form.causal else 0
            gradients = 2 * groups * degrees["context"] * 4 / step.itemsize
            return head_bytes * ((forwards + 1) * (2 * groups * others + zig_zag) + gradients)
