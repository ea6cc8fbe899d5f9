"""The config.json that a GGUF file's metadata amounts to. No jax here.

GGUF has keys of its own for what a config.json says, and leaves out what readers know by the architecture. What comes
out has the older form of rotary keys, and states each value that a family would otherwise take its default for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.published.gguf import GgufFile, read_tensor
from jaxtrain.published.longrope import longrope_factor

# Keys that change nothing in the outputs, or that the tensors say themselves.
_NO_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
# Readers of GGUF rotate by this where the file does not say otherwise.
_USUAL_THETA = 10000.0
# What all of Llama 3.1 and later have; a GGUF file holds only the table `rope_freqs` that follows from it.
_LOW, _HIGH, _USUAL_LENGTH = 1.0, 4.0, 8192


@dataclass
class _Keys:
    """The keys of one architecture, each taken once; what nobody takes is not known."""

    file: GgufFile
    architecture: str
    left: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        start = f"{self.architecture}."
        found = self.file.metadata.items()
        self.left = {key.removeprefix(start): value for key, value in found if key.startswith(start)}

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns a finite number that is the same in every layer; it is 0 only where that is the default."""
        found = self.left.pop(key, None)
        same = isinstance(found, list) and found and all(one == found[0] for one in found)
        value: Any = found[0] if same else found
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.file.path} does not state {self.architecture}.{key}, which the model needs")
        if type(value) not in (int, float):
            raise self.unsupported(key, value, "one number for all layers is read")
        if not math.isfinite(value) or value < 0 or (value == 0 and default != 0):
            raise self.unsupported(key, value, "it has to be a finite number above 0")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number, otherwise as `number`."""
        value = self.number(key, default)
        if type(value) is not int:
            raise self.unsupported(key, value, "it has to be a whole number")
        return value

    def layers(self) -> int:
        """Returns the number of layers, which cannot be so large that counting them takes long."""
        value, most = self.count("block_count"), len(self.file.tensors)
        if value > most:
            raise self.unsupported("block_count", value, f"the file holds {most} tensors")
        return value

    def unsupported(self, key: str, value: object, wanted: str) -> ConfigError:
        shown = value if isinstance(value, str) and value.isprintable() else repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ConfigError(f"{self.file.path} has {self.architecture}.{key}: {shown}, which is not supported; {wanted}")


def published_config(file: GgufFile) -> dict[str, Any]:
    """Returns the config.json of a GGUF file.

    Raises:
        ConfigError: The architecture, a key or a value of it is not supported, or a key is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has general.architecture: {architecture!r}; the known ones are {', '.join(_ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError(
            f"{file.path} is one of {file.metadata['split.count']!r} parts of a model; merge them with "
            "llama-gguf-split --merge"
        )
    keys = _Keys(file, architecture)
    config = _ARCHITECTURES[architecture](keys)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight; a file of a whole model is read")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for key in _NO_EFFECT:
        keys.left.pop(key, None)
    if keys.left.pop("attention.causal", True) is not True:
        raise keys.unsupported("attention.causal", False, "decoders are read")
    if keys.left:
        key, value = next(iter(keys.left.items()))
        raise keys.unsupported(key, value, "no family knows the key")
    return config


def _decoder(keys: _Keys) -> dict[str, Any]:
    """Returns what all decoders with rotary positions have, less the rotary scaling."""
    config = {
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": keys.count("attention.head_count"),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", _USUAL_THETA),
    }
    heads = config["num_attention_heads"]
    if heads > config["hidden_size"]:
        raise keys.unsupported("attention.head_count", heads, f"embedding_length is {config['hidden_size']}")
    config["num_key_value_heads"] = keys.count("attention.head_count_kv", heads)
    usual = config["hidden_size"] // heads
    width = keys.count("attention.key_length", usual)
    values = keys.count("attention.value_length", usual)
    if values != width:
        raise keys.unsupported("attention.value_length", values, f"it has to be attention.key_length, {width}")
    rotated = keys.count("rope.dimension_count", width)
    if rotated != width:
        if keys.architecture != "phi3":
            raise keys.unsupported("rope.dimension_count", rotated, f"it has to be attention.key_length, {width}")
        config["partial_rotary_factor"] = rotated / width
    # Phi-3 has no key for the width of a head.
    if keys.architecture != "phi3":
        config["head_dim"] = width
    elif width != usual:
        raise keys.unsupported("attention.key_length", width, f"it has to be {usual}")
    return config


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a config.json."""
    kind = keys.left.pop("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", kind, "none, linear and yarn are read")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    # Linear scaling has no use for it.
    original = keys.count("rope.scaling.original_context_length", 0)
    if kind == "yarn":
        if not original:
            raise ConfigError(
                f"{keys.file.path} does not state {keys.architecture}.rope.scaling.original_context_length"
            )
        scaling["original_max_position_embeddings"] = original
        for theirs in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{theirs}" in keys.left:
                scaling[theirs] = keys.number(f"rope.scaling.yarn_{theirs}")
    return scaling


def _llama(keys: _Keys) -> dict[str, Any]:
    config = _decoder(keys)
    scaling = _scaling(keys)
    if "rope_freqs.weight" in keys.file.tensors:
        if scaling is not None:
            raise keys.unsupported("rope.scaling.type", scaling["rope_type"], "the file also has the table rope_freqs")
        scaling = _llama3_scaling(keys.file, config)
    config["rope_scaling"] = scaling
    window = keys.count("attention.sliding_window", 0)
    experts = keys.count("expert_count", 0)
    used = keys.count("expert_used_count", 0)
    if experts:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": used}
        return {"model_type": "mixtral", **config, **mixture, "sliding_window": window or None}
    if window:
        return {"model_type": "mistral", **config, "sliding_window": window}
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in keys.file.tensors,
    }
    return {"model_type": "llama", **config, **biases}


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the scaling whose table of divisors of the frequencies the file holds.

    Llama 3.1 and later differ in the factor and in the original length only; both can be read off the table.
    """
    table = np.asarray(read_tensor(file, "rope_freqs.weight"), np.float64).reshape(-1)
    half = config["head_dim"] // 2
    if np.all(table == 1):
        return None
    factor = float(np.round(table.max(), 4))
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    if table.shape == wavelength.shape and table.min() >= 1 and factor > 1:
        # A frequency between the two ends tells the original length; a table without one has the usual length.
        smooth = (1 / table - 1 / factor) / (1 - 1 / factor)
        inside = np.flatnonzero((smooth > 0.01) & (smooth < 0.99))
        lengths = wavelength * (_LOW + smooth * (_HIGH - _LOW))
        original = round(float(lengths[inside[0]])) if inside.size else _USUAL_LENGTH
        expected = np.clip((original / wavelength - _LOW) / (_HIGH - _LOW), 0, 1)
        # The table is rounded to float32 from float32 arithmetic, and the length is a whole number.
        if np.allclose(table, 1 / ((1 - expected) / factor + expected), rtol=1e-3):
            ends = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor, **ends}
    raise ConfigError(
        f"{file.path} has a table rope_freqs that is not of Llama 3 (between the factors {_LOW} and {_HIGH}); "
        "give the published folder of safetensors"
    )


def _qwen(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": keys.architecture, **_decoder(keys), "rope_scaling": _scaling(keys)}
    if keys.architecture == "qwen2":
        # Qwen2 has no key for the width of a head.
        width, usual = config.pop("head_dim"), config["hidden_size"] // config["num_attention_heads"]
        if width != usual:
            raise keys.unsupported("attention.key_length", width, f"it has to be {usual}")
    return config


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    config = _qwen(keys) | {"model_type": "qwen3_moe"}
    config["moe_intermediate_size"] = keys.count("expert_feed_forward_length")
    config["num_experts"] = keys.count("expert_count")
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    # GGUF has no key for it: readers always divide by the sum of the chosen experts' shares.
    return config | {"norm_topk_prob": True}


def _gemma(keys: _Keys) -> dict[str, Any]:
    config = _decoder(keys)
    config["sliding_window"] = keys.count("attention.sliding_window")
    # The largest model of each generation divides by the width per head of the residual stream; GGUF does not say so.
    largest = {"gemma2": 46, "gemma3": 62}[keys.architecture]
    share = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = share if config["num_hidden_layers"] == largest else config["head_dim"]
    if keys.architecture == "gemma2":
        caps = {
            "attn_logit_softcapping": keys.number("attn_logit_softcapping"),
            "final_logit_softcapping": keys.number("final_logit_softcapping"),
        }
        return {"model_type": "gemma2", **config, **caps}
    local = keys.number("rope.freq_base_swa", _USUAL_THETA)
    return {"model_type": "gemma3_text", **config, "rope_scaling": _scaling(keys), "rope_local_base_freq": local}


def _phi3(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "phi3", **_decoder(keys)}
    config["sliding_window"] = keys.count("attention.sliding_window", 0) or None
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    given = keys.number("rope.scaling.attn_factor", 1.0)
    tables = {one: f"rope_factors_{one}.weight" for one in ("short", "long")}
    if not set(keys.file.tensors) & set(tables.values()):
        return config | {"rope_scaling": None}
    if missing := set(tables.values()) - set(keys.file.tensors):
        raise ConfigError(f"{keys.file.path} has one table of rotary factors, but no tensor {missing.pop()}")
    usual = longrope_factor(original, config["max_position_embeddings"])
    if not math.isclose(given, usual, rel_tol=1e-4):
        raise keys.unsupported("rope.scaling.attn_factor", given, f"the length of the context asks for {usual:.6f}")
    factors = {
        f"{one}_factor": [float(str(x)) for x in np.asarray(read_tensor(keys.file, name), np.float32)]
        for one, name in tables.items()
    }
    return config | {"rope_scaling": {"rope_type": "longrope", **factors}}


def _gpt2(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": keys.count("embedding_length"),
        "n_inner": keys.count("feed_forward_length"),
        "n_layer": keys.layers(),
        "n_head": keys.count("attention.head_count"),
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


_ARCHITECTURES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    **{"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "qwen3moe": _qwen3_moe},
    **{"gemma2": _gemma, "gemma3": _gemma, "phi3": _phi3, "gpt2": _gpt2},
}


def rotary_heads(file: GgufFile, config: dict[str, Any]) -> dict[str, int]:
    """Returns the heads of `attn_q` and `attn_k` where their rows are in the order of neighbouring pairs."""
    if file.metadata["general.architecture"] != "llama":
        return {}
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
