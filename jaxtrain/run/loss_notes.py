"""What a run says of its loss before it starts."""

import numpy as np

from jaxtrain.config.models import TransformerConfig
from jaxtrain.metrics.format import format_bytes
from jaxtrain.ops.loss.blocks import choose_blocks
from jaxtrain.train.assemble import Run


def loss_notes(run: Run) -> list[str]:
    """How the logits of the config's own transformer are chunked, where they are; see `ops/loss/blocks.py`."""
    config, model, degrees = run.config, run.config.model, run.step.mesh.shape
    vocabulary = getattr(model, "vocab_size", None) or run.data.vocab_size
    if not isinstance(model, TransformerConfig) or vocabulary is None or not run.step.task.takes_deferred_logits:
        return []
    pipeline = run.step.pipeline
    microbatches = config.train.accumulation_steps if pipeline is None else pipeline.schedule.num_microbatches
    shards = degrees["data"] * degrees["fsdp"] * degrees["expert"] * degrees["context"] * microbatches
    tokens = config.train.global_batch_size * run.data.input_shape[0] // shards
    ids = vocabulary // degrees["tensor"]
    itemsize = np.dtype(run.step.policy.compute_dtype).itemsize
    by = None if config.loss.logits == "auto" else config.loss.logits
    blocks = choose_blocks(tokens, model.embed_dim, ids, itemsize=itemsize, by=by, size=config.loss.block)
    if blocks.by == "whole":
        return []
    unit = "tokens" if blocks.by == "tokens" else "ids"
    return [
        f"loss: logits by {blocks.by}, {blocks.count:,} blocks of {blocks.size:,} {unit} "
        f"({format_bytes(itemsize * tokens * ids)} per device without blocks)"
    ]
