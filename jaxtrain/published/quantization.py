"""The key quantization_config of a config.json: which quantized tensors are read. No jax here, nor numpy."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError


def without_quantization(config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Returns a config.json without its key quantization_config; the tensors say themselves how they are stored.

    Args:
        config: The object in the config.json.
        where: The file, for the message.

    Raises:
        ConfigError: The tensors are quantized in another way than to nf4 by bitsandbytes.
    """
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        method, kind = found.get("quant_method"), found.get("bnb_4bit_quant_type")
        four = found.get("load_in_4bit", found.get("_load_in_4bit"))
        if method != "bitsandbytes" or not four or kind != "nf4":
            stored = method or dict(found)
            if method == "bitsandbytes":
                stored = f"{'4-bit ' + str(kind) if four else '8-bit'} of bitsandbytes"
            raise ConfigError(
                f"{where}: quantization_config says that the tensors are quantized as {stored}; nf4 of "
                "bitsandbytes is read, and float32, float16 and bfloat16: publish them as one of these first"
            )
        storage = found.get("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            raise ConfigError(f"{where}: bnb_4bit_quant_storage={storage!r} is not read; save the model with uint8")
    return {key: value for key, value in config.items() if key != "quantization_config" or value is None}
