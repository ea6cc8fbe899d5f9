"""A GGUF file seen as a published folder: config.json, tensors by their published names, tokenizer. No jax here.

GGUF has keys and names of its own, one set for all families, and leaves out what readers know by the architecture. The
config has the older form of rotary keys, and states each value that a family would otherwise take its default for.
Converting to GGUF changes some tensors; `Stored` says how to read each of them as it was published:

- The rows of the query and key projections of arch `llama` are reordered within each head, from the two halves of
  rotary embedding to neighbouring pairs.
- The norm weights of Gemma are stored as 1 + w. Subtracting 1 is the one calculation among all imports; it is exact
  to the rounding of the addition that it undoes.
- GPT-2's linear layers are transposed.
- The matrices of a layer's experts are stacked in one tensor.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.gguf import GgufFile, read_gguf, read_tensor
from jaxtrain.formats.gguf_tokenizer import tokenizer_files
from jaxtrain.formats.rope import longrope_factor
from jaxtrain.formats.rows import Kind

# Keys that change nothing in the outputs, or that the tensors say themselves.
_NO_EFFECT = ("attention.causal", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
# Readers of GGUF rotate by this where the file does not say otherwise.
_USUAL_THETA = 10000.0
# What all of Llama 3.1 and later have; a GGUF file holds only the table `rope_freqs` that follows from it.
_LOW, _HIGH, _USUAL_LENGTH = 1.0, 4.0, 8192


class _Keys:
    """The keys of one architecture, each taken once; what nobody takes is not known."""

    def __init__(self, file: GgufFile, architecture: str):
        self.file, self.architecture, start = file, architecture, f"{architecture}."
        found = file.metadata.items()
        self.left = {key.removeprefix(start): value for key, value in found if key.startswith(start)}

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns a number that is the same in every layer; it is 0 only where that is the default."""
        found = self.left.pop(key, default)
        value: Any = found[0] if isinstance(found, list) and found == found[:1] * len(found) != [] else found
        if type(value) not in (int, float) or not 0 <= value < math.inf or (value == 0 and default != 0):
            raise self.unsupported(key, value, "it must be one number above 0, for all layers")
        return value

    def unsupported(self, key: str, value: object, wanted: str) -> ConfigError:
        shown = str(value)[:60]
        return ConfigError(f"{self.file.path} has {self.architecture}.{key}: {shown}, which is not supported; {wanted}")


def published_config(file: GgufFile) -> dict[str, Any]:
    """Returns the config.json of a GGUF file; a ConfigError where a key or a value is not supported."""
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has general.architecture: {architecture}; the known ones are {', '.join(_ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) not in (0, 1) or "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} is a part of a model; merge the parts with llama-gguf-split --merge")
    keys = _Keys(file, architecture)
    config = _ARCHITECTURES[architecture](keys)
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for key in _NO_EFFECT:
        keys.left.pop(key, None)
    if keys.left:
        raise keys.unsupported(*next(iter(keys.left.items())), "no family knows the key")
    return config


def _decoder(keys: _Keys) -> dict[str, Any]:
    """Returns what all decoders with rotary positions have, less the rotary scaling."""
    config = {
        "hidden_size": keys.number("embedding_length"),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": keys.number("attention.head_count"),
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", _USUAL_THETA),
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.number("attention.head_count_kv", heads)
    usual = config["hidden_size"] // heads
    width = keys.number("attention.key_length", usual)
    values, rotated = keys.number("attention.value_length", usual), keys.number("rope.dimension_count", width)
    # Phi-3 and Qwen2 have no key for the width of a head.
    known = {usual} if keys.architecture in ("phi3", "qwen2") else {width}
    if keys.architecture == "phi3" and rotated != width:
        config["partial_rotary_factor"], rotated = rotated / width, width
    if {width, values, rotated} != known:
        raise keys.unsupported("attention.key_length", [width, values, rotated], "keys, values and rotated are equal")
    return config if keys.architecture in ("phi3", "qwen2") else config | {"head_dim": width}


def _scaling(keys: _Keys) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a config.json."""
    kind = keys.left.pop("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    # Linear scaling has no use for it.
    original = keys.number("rope.scaling.original_context_length", 0 if kind == "linear" else None)
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for theirs in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{theirs}" in keys.left:
                scaling[theirs] = keys.number(f"rope.scaling.yarn_{theirs}")
    return scaling


def _llama(keys: _Keys) -> dict[str, Any]:
    config, tensors = _decoder(keys), keys.file.tensors
    config["rope_scaling"] = _scaling(keys)
    if "rope_freqs.weight" in tensors:
        config["rope_scaling"] = _llama3_scaling(keys.file, config)
    window = keys.number("attention.sliding_window", 0)
    experts, used = keys.number("expert_count", 0), keys.number("expert_used_count", 0)
    if experts:
        mixture = {"num_local_experts": experts, "num_experts_per_tok": used}
        return {"model_type": "mixtral", **config, **mixture, "sliding_window": window or None}
    if window:
        return {"model_type": "mistral", **config, "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return {"model_type": "llama", **config, **biases}


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the scaling whose table of divisors of the frequencies the file holds."""
    table = np.asarray(read_tensor(file, "rope_freqs.weight"), np.float64).reshape(-1)
    if np.all(table == 1):
        return None
    half, factor = config["head_dim"] // 2, float(np.round(table.max(), 4))
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    if len(table) == half and table.min() >= 1 and factor > 1:
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
    return {"model_type": keys.architecture, **_decoder(keys), "rope_scaling": _scaling(keys)}


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    experts = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        # GGUF has no key for it: readers always divide by the sum of the chosen experts' shares.
        "norm_topk_prob": True,
    }
    return _qwen(keys) | experts


def _gemma(keys: _Keys) -> dict[str, Any]:
    config = _decoder(keys)
    config["sliding_window"] = keys.number("attention.sliding_window")
    # The largest model of each generation divides by the width per head of the residual stream; GGUF does not say so.
    largest = {"gemma2": 46, "gemma3": 62}[keys.architecture]
    share = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = share if config["num_hidden_layers"] == largest else config["head_dim"]
    if keys.architecture == "gemma2":
        caps = {key: keys.number(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        return {"model_type": "gemma2", **config, **caps}
    local = keys.number("rope.freq_base_swa", _USUAL_THETA)
    return {"model_type": "gemma3_text", **config, "rope_scaling": _scaling(keys), "rope_local_base_freq": local}


def _phi3(keys: _Keys) -> dict[str, Any]:
    config = {"model_type": "phi3", **_decoder(keys)}
    config["sliding_window"] = keys.number("attention.sliding_window", 0) or None
    longest = config["max_position_embeddings"]
    original = keys.number("rope.scaling.original_context_length", longest)
    config |= {"original_max_position_embeddings": original, "rope_scaling": None}
    given = keys.number("rope.scaling.attn_factor", 1.0)
    tables = {one: f"rope_factors_{one}.weight" for one in ("short", "long")}
    if not set(keys.file.tensors).issuperset(tables.values()):
        return config
    factors = {
        f"{one}_factor": [float(str(x)) for x in np.asarray(read_tensor(keys.file, name), np.float32)]
        for one, name in tables.items()
    }
    scaling = {"rope_type": "longrope", **factors}
    if not math.isclose(given, longrope_factor(original, longest), rel_tol=1e-4):
        scaling["attention_factor"] = given
    return config | {"rope_scaling": scaling}


def _gpt2(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": keys.number("embedding_length"),
        "n_inner": keys.number("feed_forward_length"),
        "n_layer": keys.number("block_count"),
        "n_head": keys.number("attention.head_count"),
        "n_positions": keys.number("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


_ARCHITECTURES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    **{"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "qwen3moe": _qwen3_moe},
    **{"gemma2": _gemma, "gemma3": _gemma, "phi3": _phi3, "gpt2": _gpt2},
}

# Name in GGUF -> published name: outside the layers, in a layer ("blk.N."), and before a layer's number.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"}
# Model types whose layers have other names than Llama's. Experts have {} for their number.
_LAYERS = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "mixtral": _LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3_moe": _LAYER | {"ffn_gate_inp": "mlp.gate"},
    "gpt2": _GPT2,
}
_EXPERTS = {
    "mixtral": {f"ffn_{part}": f"block_sparse_moe.experts.{{}}.{name}" for part, name in
                (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    "qwen3_moe": {f"ffn_{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
# Tables that the config is made from, and no weights.
_ROPE_TABLES = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+?)(?P<experts>_exps)?\.(?P<end>weight|bias)")


@dataclass(frozen=True)
class Stored:
    """How a published tensor is stored in a GGUF file.

    Attributes:
        name: Name in the GGUF file.
        expert: Index into its first dimension; None: all of it.
        rotary_heads: Number of heads whose rows are in the order of neighbouring pairs; 0: as published.
        plus_one: The stored values are 1 larger than the published ones.
        transposed: Its two dimensions are in the opposite order.
    """

    name: str
    expert: int | None = None
    rotary_heads: int = 0
    plus_one: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file in the place of a published folder, by published names; quantized tensors are float32."""

    file: GgufFile
    config: Mapping[str, Any]
    stored: Mapping[str, Stored]
    tensors: Mapping[str, Kind]

    @property
    def files(self) -> dict[str, str]:
        """Name -> text of the tokenizer's files."""
        return tokenizer_files(self.file.path, self.file.metadata)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor by its published name."""
        stored = self.stored[name]
        found = read_tensor(self.file, stored.name, stored.expert)
        if stored.transposed:
            return found.T
        if stored.rotary_heads:
            # Row i of half s of a head is row 2 i + s of it.
            return found.reshape(stored.rotary_heads, -1, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        return found - found.dtype.type(1) if stored.plus_one else found


def open_gguf(path: str | Path) -> GgufSource:
    """Opens a GGUF file as a published folder; a CheckpointError, or a ConfigError of `published_config`, where not."""
    file = read_gguf(path)
    config = published_config(file)
    stored, tensors = {}, {}
    for name, tensor in file.tensors.items():
        if name in _ROPE_TABLES:
            continue
        found = _published(name, file, config)
        if not found:
            raise CheckpointError(f"{file.path} holds the tensor {name}, which {config['model_type']} does not have")
        for theirs, one in found.items():
            shape = tensor.shape[::-1] if one.transposed else tensor.shape
            stored[theirs], tensors[theirs] = one, (shape if one.expert is None else shape[1:], tensor.kind.dtype)
    return GgufSource(file, config, stored, tensors)


def _published(name: str, file: GgufFile, config: Mapping[str, Any]) -> dict[str, Stored]:
    """Published name -> how it is stored, of what a tensor holds; empty where the model type does not have it."""
    kind, found = config["model_type"], _NAME.fullmatch(name)
    if found is None:
        return {}
    layer, part, end = found["layer"], found["part"], found["end"]
    plus_one = kind.startswith("gemma") and part.endswith("norm")
    if layer is None:
        top = (_GPT2_TOP | {"output": "lm_head"} if kind == "gpt2" else _TOP).get(part)
        return {f"{top}.{end}": Stored(name, plus_one=plus_one)} if top else {}
    prefix = f"{'transformer.h' if kind == 'gpt2' else 'model.layers'}.{layer}"
    if found["experts"]:
        theirs = _EXPERTS.get(kind, {}).get(part)
        count = config.get("num_local_experts", config.get("num_experts", 0))
        return {f"{prefix}.{theirs.format(at)}.{end}": Stored(name, at) for at in range(count)} if theirs else {}
    theirs, heads = _LAYERS.get(kind, _LAYER).get(part), 0
    if file.metadata["general.architecture"] == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    transposed = kind == "gpt2" and end == "weight" and "norm" not in part
    one = Stored(name, rotary_heads=heads, plus_one=plus_one, transposed=transposed)
    return {f"{prefix}.{theirs}.{end}": one} if theirs else {}
