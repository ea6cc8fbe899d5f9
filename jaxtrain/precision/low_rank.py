"""A kernel of a linear layer with a low-rank adapter (Hu et al. 2021, arXiv 2106.09685).

Dims of shapes: D input features, F output features, R rank; `*stack` are the dims that count layers.
"""

from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankKernel:
    """The kernel `base + scale * lora_a @ lora_b`, which takes the place of the float array in the parameters.

    Attributes:
        base: the frozen kernel [*stack, *D, *F]: a float array, or a quantized kernel.
        lora_a: float [*stack, *D, R].
        lora_b: float [*stack, R, *F].
        scale: what the product is multiplied by.
        dropout: share of the adapter's inputs that become 0 in training.
        key: random key [*stack] of the masks, which a model puts in while it trains; None: nothing is dropped.
    """

    base: Any
    lora_a: jax.Array
    lora_b: jax.Array
    scale: float = field(default=1.0, metadata=dict(static=True))
    dropout: float = field(default=0.0, metadata=dict(static=True))
    key: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [*stack, *D, *F]."""
        return self.base.shape

    @property
    def rank(self) -> int:
        """R, the columns of `lora_a`."""
        return self.lora_a.shape[-1]

    def reshape(self, num_inputs: int, num_outputs: int) -> "LowRankKernel":
        """Returns a kernel without stack dims as a matrix [D, F].

        Args:
            num_inputs: D, the product of the input dims.
            num_outputs: F, the product of the output dims.
        """
        base = self.base.reshape(num_inputs, num_outputs)
        lora_a, lora_b = self.lora_a.reshape(num_inputs, self.rank), self.lora_b.reshape(self.rank, num_outputs)
        return LowRankKernel(base, lora_a, lora_b, self.scale, self.dropout, self.key)
