"""The dtypes of each precision policy, by name. No jax here: the planner asks too."""

from collections.abc import Mapping
from dataclasses import dataclass

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PolicyDtypes:
    """Names of the dtypes of a policy.

    Attributes:
        params: of the stored parameters.
        compute: of parameters and inputs in the forward and backward pass.
    """

    params: str
    compute: str

    @property
    def param_bytes(self) -> int:
        """Bytes per stored parameter."""
        return _BYTES[self.params]

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in the forward and backward pass."""
        return _BYTES[self.compute]


POLICY_DTYPES: Mapping[str, PolicyDtypes] = {
    "fp32": PolicyDtypes("float32", "float32"),
    "tf32": PolicyDtypes("float32", "float32"),
    "bf16": PolicyDtypes("float32", "bfloat16"),
    "bf16_pure": PolicyDtypes("bfloat16", "bfloat16"),
    "fp16": PolicyDtypes("float32", "float16"),
    "fp8": PolicyDtypes("float32", "bfloat16"),
}
