"""Names of remat policies and of the tensors that they keep or offload, and which go together. No jax here."""

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError

# Names that blocks give to their tensors (`jax.ad_checkpoint.checkpoint_name`), for policy "names".
TENSOR_NAMES = ("query", "key", "value", "attention_output", "attention_projection", "mlp_hidden", "mlp_output")
# The input of a block: every policy keeps it, so it can be offloaded but not listed in remat.names.
BLOCK_INPUT = "block_input"

POLICIES = ("none", "full", "dots", "sqrt", "names")


def check_remat(policy: str, names: tuple[str, ...], offload: tuple[str, ...]) -> None:
    """Checks that the settings of remat go together.

    Args:
        policy: One of `POLICIES`.
        names: Tensors to keep under policy "names".
        offload: Tensors to keep in the memory of the host.

    Raises:
        ConfigError: The policy or a tensor is unknown, or the policy does not choose tensors by name.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown remat.policy {policy!r}; known: {', '.join(POLICIES)}")
    for key, given in (("names", names), ("offload", offload)):
        # A text is a sequence of letters, of which the first would be called an unknown tensor.
        if not isinstance(given, tuple | list):
            word = given if isinstance(given, str) else "query"
            raise ConfigError(refusal(f"remat.{key}", "a tuple of tensors", given, f"({word!r},)"))
    for key, given, known in (("names", names, TENSOR_NAMES), ("offload", offload, (BLOCK_INPUT, *TENSOR_NAMES))):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"remat.{key}: no tensor {unknown[0]!r}; known: {', '.join(known)}")
    if policy == "names" and not names:
        raise ConfigError(f"remat.policy=names needs remat.names; known: {', '.join(TENSOR_NAMES)}")
    if offload and policy not in ("full", "names"):
        raise ConfigError(
            f"remat.offload={list(offload)} does not work under remat.policy={policy}, which does not "
            "choose tensors by name; use remat.policy=full or names"
        )
    both = [name for name in offload if name in names]
    if both and policy == "names":
        raise ConfigError(f"remat.names and remat.offload both hold {both[0]!r}; leave it out of one of them")
