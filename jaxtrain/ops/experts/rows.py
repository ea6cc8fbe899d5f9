"""Rows of the experts' grouped matmuls: the rule of the step and of the planner. No jax here.

No token is dropped, so that shapes are those of the worst case: every token may choose experts of one shard.
"""

# Backends without a kernel for a grouped matmul: every row meets every expert of the device and is masked.
_MASKED = ("cpu", "gpu")


def grouped_rows(num_tokens: float, experts_per_token: int, num_experts: int) -> float:
    """Count the rows of a grouped matmul that has room for every routing of its tokens.

    Args:
        num_tokens: that may come to these experts.
        experts_per_token: distinct ones that a token chooses.
        num_experts: of one device.
    """
    return num_tokens * min(experts_per_token, num_experts)


def multiplied_rows(platform: str, num_rows: float, filled: float, num_experts: int) -> float:
    """Count the rows that a backend multiplies with the kernel of one expert each.

    Args:
        platform: cpu, gpu or tpu.
        num_rows: of the grouped matmul, from `grouped_rows`.
        filled: those that hold a token, on average.
        num_experts: of one device.
    """
    return num_rows * num_experts if platform in _MASKED else filled
