"""What may stand in the place of the float array of a linear layer's kernel: each kind is the type of one leaf."""

from typing import Any

from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.precision.nf4 import Nf4Kernel
from jaxtrain.precision.quantized import QuantizedKernel

QUANTIZED = (QuantizedKernel, Nf4Kernel)
"""Kinds of kernels in fewer bits: their scales are part of their values, and nothing casts or trains them."""


def is_quantized(leaf: Any) -> bool:
    """Whether a leaf of the parameters is a quantized kernel."""
    return isinstance(leaf, QUANTIZED)


def is_kernel(leaf: Any) -> bool:
    """Whether a leaf of the parameters is a kernel that is no float array: what `is_leaf` of tree functions takes."""
    return isinstance(leaf, (LowRankKernel, *QUANTIZED))
