"""The names of a GGUF file's tensors in the published safetensors files of the same model. No jax here.

GGUF has one set of names for all families, and converting to it changes some tensors; `Stored` says how to read each of
them as it was published:

- The rows of the query and key projections of arch `llama` are reordered within each head, from the two halves of
  rotary embedding to neighbouring pairs.
- The norm weights of Gemma are stored as 1 + w. Subtracting 1 is the one calculation among all imports; it is exact
  to the rounding of the addition that it undoes.
- GPT-2's linear layers are transposed.
- The matrices of a layer's experts are stacked in one tensor.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


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


# Within a layer: name in GGUF -> name in the file of model types that name tensors as Llama does.
_LLAMA_LAYER = {
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
_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GEMMA_LAYER = _LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYER = _LLAMA_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_MIXTRAL_LAYER = _LLAMA_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"}
_QWEN3_MOE_LAYER = _LLAMA_LAYER | {"ffn_gate_inp": "mlp.gate"}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}


@dataclass(frozen=True)
class _Names:
    """Names of a model type: of tensors outside the layers, in a layer, before a layer's number, and of experts."""

    layer: Mapping[str, str]
    top: Mapping[str, str]
    prefix: str
    experts: Mapping[str, str]


def _like_llama(layer: Mapping[str, str], experts: Mapping[str, str] | None = None) -> _Names:
    return _Names(layer, _LLAMA_TOP, "model.layers", experts or {})


# The model type of config.json -> its names.
_NAMES = {
    "llama": _like_llama(_LLAMA_LAYER),
    "mistral": _like_llama(_LLAMA_LAYER),
    "mixtral": _like_llama(
        _MIXTRAL_LAYER,
        {
            "ffn_gate": "block_sparse_moe.experts.{}.w1",
            "ffn_up": "block_sparse_moe.experts.{}.w3",
            "ffn_down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "qwen2": _like_llama(_LLAMA_LAYER),
    "qwen3": _like_llama(_LLAMA_LAYER),
    "qwen3_moe": _like_llama(
        _QWEN3_MOE_LAYER,
        {
            "ffn_gate": "mlp.experts.{}.gate_proj",
            "ffn_up": "mlp.experts.{}.up_proj",
            "ffn_down": "mlp.experts.{}.down_proj",
        },
    ),
    "gemma2": _like_llama(_GEMMA_LAYER),
    "gemma3_text": _like_llama(_GEMMA_LAYER),
    "phi3": _like_llama(_PHI3_LAYER),
    "gpt2": _Names(_GPT2_LAYER, _GPT2_TOP, "transformer.h", {}),
}
# Tables that the config is made from (`gguf_config`), and no weights.
_ROPE_TABLES = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.(\w+)\.(\d+)\.weight")
_TOP = re.compile(r"(\w+)\.(weight|bias)")


def published_names(
    model_type: str, names: Iterable[str], *, rotary_heads: Mapping[str, int], num_experts: int = 0
) -> tuple[dict[str, Stored], list[str]]:
    """Returns the published name of every tensor.

    Args:
        model_type: `model_type` of the config.json.
        names: Names in the GGUF file.
        rotary_heads: Number of heads of `attn_q` and `attn_k` whose rows are in another order; empty: they are not.
        num_experts: Experts per layer, which one tensor holds.

    Returns:
        Published name -> how it is stored; and the names in the GGUF file that the model type does not have.
    """
    known = _NAMES[model_type]
    found: dict[str, Stored] = {}
    strange = []
    for name in names:
        if name in _ROPE_TABLES:
            continue
        if one := _LAYER.fullmatch(name):
            number, part, suffix = one.groups()
            if part.endswith("_exps") and part.removesuffix("_exps") in known.experts and suffix == "weight":
                theirs = known.experts[part.removesuffix("_exps")]
                for expert in range(num_experts):
                    found[f"{known.prefix}.{number}.{theirs.format(expert)}.weight"] = Stored(name, expert)
                continue
            theirs = f"{known.prefix}.{number}.{known.layer[part]}.{suffix}" if part in known.layer else None
            stored = Stored(name, rotary_heads=rotary_heads.get(part, 0))
        elif (one := _EXPERT.fullmatch(name)) and one[2] in known.experts:
            theirs, stored = f"{known.prefix}.{one[1]}.{known.experts[one[2]].format(one[3])}.weight", Stored(name)
        else:
            one = _TOP.fullmatch(name)
            theirs = f"{known.top[one[1]]}.{one[2]}" if one and one[1] in known.top else None
            stored = Stored(name)
        if theirs is None:
            strange.append(name)
            continue
        if model_type.startswith("gemma") and name.endswith("norm.weight"):
            stored = replace(stored, plus_one=True)
        if model_type == "gpt2" and stored.name.startswith("blk.") and not re.search(r"norm|bias", name):
            stored = replace(stored, transposed=True)
        found[theirs] = stored
    return found, strange
