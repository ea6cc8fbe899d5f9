"""What the experts of a layer multiply and send where a step is planned for. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.rules import AXES
from jaxtrain.ops.experts.rows import is_one_round, multiplied_rows, round_rows
from jaxtrain.plan.targets import Target

# Expert ids are int32, the weights of a token's experts float32.
_ID_BYTES = 4


@dataclass(frozen=True)
class ExpertWork:
    """Experts of one layer on one device, for each token of the device.

    Attributes:
        rows: of the grouped matmuls.
        multiplied: rows that are multiplied with the kernel of one expert each, those that fill up blocks among them.
        again: forward passes that the backward pass runs whatever the remat policy keeps.
        sums_gradients: whether a loop sums gradients of the kernels in float32, beside those of the first round.
    """

    rows: float
    multiplied: float
    again: float = 0.0
    sums_gradients: bool = False


def expert_work(config: Config, target: Target, tokens: float) -> ExpertWork | None:
    """The experts of a config on a target for tokens of one microbatch on one device, where the routing is even."""
    model = config.model
    if not isinstance(model, TransformerConfig) or model.experts is None:
        return None
    shards, choices, total = int(config.parallel.expert), model.experts.experts_per_token, model.experts.num_experts
    sizes = (tokens, choices, total, shards)
    # A device gets from each as many rows as it sends to each.
    rows = tokens * min(choices, total) if shards == 1 else shards * round_rows(*sizes)
    multiplied = multiplied_rows(target.hardware.kind, rows, tokens * choices, total // shards)
    again = 1.0 if _in_manual_region(config) else 0.0
    return ExpertWork(rows / tokens, multiplied / tokens, again, shards > 1 and not is_one_round(*sizes))


def least_experts(model: TransformerConfig) -> ExpertWork | None:
    """What experts take at least: each token meets those that it chose."""
    if model.experts is None:
        return None
    chosen = float(model.experts.experts_per_token)
    return ExpertWork(rows=chosen, multiplied=chosen)


def _in_manual_region(config: Config) -> bool:
    """Whether `run_manually` enters inside another manual region, and its backward pass computes the forward again.

    A stage of a pipeline is such a region, and so is accumulation over `data`.
    """
    parallel = config.parallel
    held = {"pipe", "data"} if int(parallel.pipe) > 1 else {"data"}
    outer = int(parallel.pipe) > 1 or (int(parallel.data) > 1 and config.train.accumulation_steps > 1)
    return outer and any(int(getattr(parallel, axis)) > 1 for axis in AXES if axis not in held)


def exchanged_bytes(
    config: Config, model: TransformerConfig, tokens: float, size: int, degrees: Mapping[str, int], forwards: int
) -> float:
    """Bytes that one device sends over `expert` for one layer and microbatch.

    The routing is even, so that one round takes it: a buffer of rows goes to every other shard, as do ids and weights
    of their experts; results come back. A backward pass sends the gradients of both buffers and of the weights. What is
    computed again sends tokens once more, and results only where the next layer needs them.

    `forwards` are forward passes without those of the remat policy, `size` bytes of a number in the compute dtype.
    """
    assert model.experts is not None
    policy = config.remat.policy
    # A segment runs again as a whole, and then block by block.
    whole = forwards + (policy == "sqrt")
    blocks = 1 if policy != "none" or _in_manual_region(config) else 0
    buffers, choices = 2 * whole + blocks + 2, 2 * (whole + blocks) + 1
    row = size * buffers * model.embed_dim + _ID_BYTES * choices
    shards = degrees["expert"]
    rows = round_rows(tokens, model.experts.experts_per_token, model.experts.num_experts, shards)
    return (shards - 1) * rows * row
