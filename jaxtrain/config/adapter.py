"""The key `finetune.adapter`: an adapter's folder that gives the settings of the adapters. No jax here."""

from typing import TYPE_CHECKING, Any

from jaxtrain.config.filled import settings_in
from jaxtrain.config.published import published_family, published_settings

if TYPE_CHECKING:
    from jaxtrain.published.peft import AdapterConfig

_KERNEL = "/kernel"


def adapter_settings(path: str, *, base: str) -> dict[str, Any]:
    """Returns the keys of `finetune.lora` that an adapter's folder gives.

    Args:
        path: The folder.
        base: The published model that it is an adapter of.

    Raises:
        ConfigError: There is no adapter, or it is of a kind that is not supported.
        CheckpointError: Its files are missing or damaged, or it is an adapter of another base.
    """
    # They read arrays, and `jaxtrain config` of other configs needs no NumPy.
    from jaxtrain.published.peft import open_adapter_folder
    from jaxtrain.published.peft_tensors import read_adapter_arrays

    folder = open_adapter_folder(path)
    rows = published_family(base).tensors(settings_in(base, published_settings(base)))
    found = read_adapter_arrays(folder, rows)
    return lora_settings(
        folder.config, rank=found.rank, scale=found.scale, kernels=tuple(found.factors), whole=tuple(found.whole)
    )


def lora_settings(
    said: "AdapterConfig", *, rank: int, scale: float, kernels: tuple[str, ...], whole: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the keys of `finetune.lora` of an adapter that was read.

    Args:
        said: Its adapter_config.json.
        rank: Of all its factors.
        scale: What the products of its factors are multiplied by.
        kernels: Paths of the kernels that it adapts.
        whole: Paths of the parameters that it trains whole.
    """
    alpha = scale * (rank**0.5 if said.rank_stabilised else rank)
    return dict(
        rank=rank,
        # As it was written, where that is what it is.
        alpha=said.alpha if (rank, scale) == (said.rank, said.scale) else alpha,
        dropout=said.dropout,
        targets=tuple(kernel.removesuffix(_KERNEL) for kernel in kernels),
        rank_stabilised=said.rank_stabilised,
        train_also=whole,
    )
