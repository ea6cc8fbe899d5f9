"""What a ZeRO stage (Rajbhandari et al. 2020) shards over mesh axis `data`. No jax here: the planner asks too."""


def stage_over_data(zero: int) -> int:
    """The stage that works over `data`: 0, 1 or 2; stage 3 is the `fsdp` axis, and leaves nothing for `data`."""
    return 0 if zero == 3 else zero


def zero_axes(zero: int) -> tuple[str, ...]:
    """Mesh axes that stored parameters, optimizer state and moving average are sharded over besides those of a step."""
    return ("data",) if stage_over_data(zero) else ()
