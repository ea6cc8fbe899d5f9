"""Which activations of a block the backward pass keeps: policies by name, applied in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.errors import ConfigError

# Names that blocks give to their tensors (`jax.ad_checkpoint.checkpoint_name`), for policy "names".
TENSOR_NAMES = ("query", "key", "value", "attention_output", "attention_projection", "mlp_hidden", "mlp_output")


@dataclass(frozen=True)
class Remat:
    """A rematerialisation policy.

    Attributes:
        policy: none (keep everything), full (keep block inputs), dots (keep results of weight matmuls), names.
        names: tensors kept under policy names, out of `TENSOR_NAMES`.
    """

    policy: str = "none"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in ("none", "full", "dots", "names"):
            raise ConfigError(f"unknown remat.policy {self.policy!r}; known: none, full, dots, names")
        unknown = [name for name in self.names if name not in TENSOR_NAMES]
        if unknown:
            raise ConfigError(f"remat.names: no tensor {unknown[0]!r}; known: {', '.join(TENSOR_NAMES)}")
        if self.policy == "names" and not self.names:
            raise ConfigError(f"remat.policy=names needs remat.names; known: {', '.join(TENSOR_NAMES)}")

    def wrap(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """The block function under this policy, for use as the body of a scan."""
        if self.policy == "none":
            return block
        policies = jax.checkpoint_policies
        keep = {
            "full": policies.nothing_saveable,
            # Weight matmuls have no batch dims; attention scores do, and are recomputed.
            "dots": policies.dots_with_no_batch_dims_saveable,
            "names": policies.save_only_these_names(*self.names),
        }[self.policy]
        # A scan already keeps forward and backward apart, so the barrier against CSE would only cost time.
        return jax.checkpoint(block, policy=keep, prevent_cse=False)
