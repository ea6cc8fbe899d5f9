"""The work of adapters and of quantized kernels on one device, beside that of the layers they are in. No jax here."""

import math
from collections.abc import Sequence

from jaxtrain.config.schema import Config
from jaxtrain.models.shipped.shapes import Structure
from jaxtrain.plan.work.block import BlockWork, DeviceBatch, recomputed_share
from jaxtrain.plan.work.state import Parameter, local_size
from jaxtrain.plan.workload.finetuned import Finetuned
from jaxtrain.precision.dtypes import POLICY_DTYPES

# Bytes per element of a quantized kernel as it is read: nf4 with its scales, and int8.
_READ = {"nf4": 0.52, "int8": 1.0}


def finetuning_blocks(stored: Finetuned, structure: Structure, config: Config, batch: DeviceBatch) -> list[BlockWork]:
    """The products with the factors of adapters, and turning quantized kernels into floats.

    Args:
        stored: what the run stores in the place of kernels.
        structure: of the model.
        config: the run.
        batch: what a device works on.
    """
    lora = config.finetune.lora
    if lora is None:
        return []
    degrees, size = batch.degrees, POLICY_DTYPES[config.precision.policy].compute_bytes
    again = 1.0 if degrees["pipe"] > 1 else 0.0
    repeat = recomputed_share(config.remat, matmul=True) + again
    blocks: list[BlockWork] = []
    for stack in structure.stacks:
        layers = stack.blocks.num_layers
        count = layers // degrees["pipe"] * batch.microbatches
        t = batch.rows * stack.length / degrees["context"]
        own = [path for path in stored.adapters if path.startswith(f"{stack.path}/")]
        factors = [math.prod(stored.tensors.params[f"{path}/{name}"]) for path in own for name in ("lora_a", "lora_b")]
        numbers = sum(factors) / layers / degrees["tensor"]
        if own:
            # An adapter of I inputs and O outputs has r (I + O) numbers; it reads and adds to t (I + O) activations.
            moved = numbers + t * (numbers / lora.rank + 2 * lora.rank * len(own))
            blocks.append(BlockWork(f"{stack.label}adapters", count, 2 * t * numbers, size * moved, repeat, stage=True))
        kernels = sum(n for path, n in stored.quantized.items() if path.startswith(f"{stack.path}/"))
        if kernels and config.finetune.base is not None:
            moved = kernels / layers / degrees["tensor"] * (_READ[config.finetune.base] + size)
            # Once for each product: of the inputs, of those again, and of the gradients.
            name = f"{stack.label}dequantization"
            blocks.append(BlockWork(name, count, 0.0, moved, repeat, backward=1.0, stage=True))
    return blocks


def kept_bytes(stored: Finetuned, structure: Structure, config: Config, batch: DeviceBatch) -> float:
    """Bytes of the results of adapters that are kept for the backward pass.

    The policy that keeps results of matmuls keeps both before they are added up (XLA for H100, jaxlib 0.10.2); under
    "none" an adapted layer keeps its arguments alone (`ops/linear.py`).

    Args:
        stored: what the run stores in the place of kernels.
        structure: of the model.
        config: the run.
        batch: what a device works on.
    """
    lora, size = config.finetune.lora, POLICY_DTYPES[config.precision.policy].compute_bytes
    if lora is None or config.remat.policy != "dots":
        return 0.0
    kept, degrees = 0.0, batch.degrees
    for stack in structure.stacks:
        own = [path for path in stored.adapters if path.startswith(f"{stack.path}/")]
        outputs = sum(math.prod(stored.tensors.params[f"{path}/lora_b"]) for path in own) / lora.rank
        t = batch.rows * stack.length / degrees["context"]
        kept += size * t * outputs / degrees["tensor"] / degrees["pipe"]
    return kept


def dequantized_bytes(config: Config, stored: Finetuned, placed: Sequence[Parameter], batch: DeviceBatch) -> float:
    """Bytes of the largest kernel of one layer as floats, which is all that is dequantized at once.

    Args:
        config: the run.
        stored: what it stores in the place of kernels.
        placed: these arrays on the mesh.
        batch: what a device works on.
    """
    if not stored.quantized:
        return 0.0
    degrees = {**batch.degrees, "fsdp": 1}
    codes = {"nf4": ("/codes", 2), "int8": ("/values", 1)}
    end, per_byte = codes[config.finetune.base or "int8"]
    size = POLICY_DTYPES[config.precision.policy].compute_bytes
    sizes = [
        local_size(one.shape, one.entries, degrees) * per_byte / (one.shape[0] / degrees["pipe"] if one.stacked else 1)
        for one in placed
        if one.path.endswith(end)
    ]
    return size * max(sizes)
