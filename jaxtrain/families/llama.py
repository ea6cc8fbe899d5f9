"""Llama 2, 3, 3.1 and 3.2, SmolLM2; Mistral 7B and Nemo, Mixtral 8x7B and 8x22B. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxtrain.families.family import (
    HEAD_KEYS,
    Family,
    decoder_keys,
    fixed,
    head_kind,
    ignored,
    own,
    read_text_head,
    rope_keys,
    size,
    write_labels,
)
from jaxtrain.formats.rows import Entry, Row, Skipped, block_rows, copy, dims, in_layers, linear, output_row

_COMMON = dict(
    position="rotary", norm="rmsnorm", norm_epsilon=1e-5, activation="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip
_LLAMA2 = _COMMON | dict(vocab_size=32000, max_sequence_length=4096, rope_theta=10000.0)
_LLAMA3 = _COMMON | dict(vocab_size=128256, max_sequence_length=8192, rope_theta=500000.0, num_kv_heads=8)
_ROPE31 = dict(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_LLAMA31 = _LLAMA3 | dict(max_sequence_length=131072, rope_scaling=_ROPE31)
_LLAMA32 = _LLAMA31 | dict(tie_embeddings=True, rope_scaling=_ROPE31 | dict(factor=32.0))
_SMOLLM2 = _COMMON | dict(vocab_size=49152, max_sequence_length=8192, rope_theta=100000.0, tie_embeddings=True)
_LABELLED = "LlamaForSequenceClassification"


BIAS_KEYS = (fixed("attention_bias", False, True), fixed("mlp_bias", False, True))
_BIASES = {(False, False): False, (True, False): "attention", (False, True): "mlp", (True, True): True}


def read_bias(file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our key `bias` for the two of `BIAS_KEYS`."""
    return dict(bias=_BIASES[file["attention_bias"], file["mlp_bias"]])


def write_bias(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `BIAS_KEYS`."""
    theirs = {ours: said for said, ours in _BIASES.items()}
    attention, mlp = theirs.get(model["bias"], (False, False))
    return dict(attention_bias=attention, mlp_bias=mlp)


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the biases, and the head: labels of a text, read at its last token, where the architecture says so."""
    biases = read_bias(file)
    if list(file["architectures"] or ()) != [_LABELLED]:
        return biases
    return biases | dict(head=read_text_head(file, pooling="last", bias=False))


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    said = write_bias(model)
    if head_kind(model) not in ("sequence", "regression"):
        return said
    return said | dict(architectures=[_LABELLED], **write_labels(model))


ATTENTION = {
    "attention_norm": "input_layernorm", "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm", "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}  # fmt: skip
MLP = {"mlp/gate": "mlp.gate_proj", "mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj"}


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    return decoder(model, [*block_rows(model, ATTENTION), *block_rows(model, MLP)])


def decoder(model: Mapping[str, Any], block: Iterable[Entry]) -> tuple[Row, ...]:
    """Returns the name table of a decoder: `block` for every layer, and the ends that have Llama's names."""
    return (*in_layers(block, "model.layers.{layer}.", int(model["num_layers"])), *ends(model))


def ends(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the embedding, the last norm and the output layer or the head."""
    D, V = dims(model, "DV")
    output = output_row(model, "lm_head.weight")
    if head_kind(model) != "language_model":
        output = Entry("head/output/kernel", "score.weight", linear((D,), (int(model["head"]["num_labels"]),)))
    norm, *bias = block_rows(model, {"output_norm": "model.norm"}, prefix="")
    return (
        Entry("embedding", "model.embed_tokens.weight", copy(V, D)),
        norm,
        output,
        Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        *bias,
    )


def expert_blocks(model: Mapping[str, Any], router: str, expert: str, **names: str) -> list[Entry]:
    """Returns the rows of a mixture of experts, of one block.

    Args:
        model: Our model group.
        router, expert: Names of the router and, with {expert}, of an expert.
        names: gate, up and down -> its name in an expert.
    """
    (D,), count = dims(model, "D"), int(model["experts"]["num_experts"])
    experts = block_rows(model, {f"mlp/{ours}": f"{expert}.{theirs}" for ours, theirs in names.items()})
    routes = Entry("blocks/mlp/router/kernel", f"{router}.weight", linear((D,), (count,)))
    return [routes, *(replace(row, stack=(count,)) for row in experts)]


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys=(
        *decoder_keys(size({}, 32, 4096, 32, vocab_size=32000, mlp_dim=11008, max_sequence_length=2048)),
        *rope_keys(10000.0),
        *HEAD_KEYS,
        *BIAS_KEYS,
        fixed("pretraining_tp", 1),
        fixed("rope_interleaved", False),
        fixed("is_llama_config", True),
    ),
    tensors=tensors,
    fixed=dict(position="rotary", norm="rmsnorm"),
    sizes={
        "llama2_7b": size(_LLAMA2, 32, 4096, 32, mlp_dim=11008),
        "llama2_13b": size(_LLAMA2, 40, 5120, 40, mlp_dim=13824),
        "llama2_70b": size(_LLAMA2, 80, 8192, 64, mlp_dim=28672, num_kv_heads=8),
        "llama3_8b": size(_LLAMA3, 32, 4096, 32, mlp_dim=14336),
        "llama3_70b": size(_LLAMA3, 80, 8192, 64, mlp_dim=28672),
        "llama3.1_8b": size(_LLAMA31, 32, 4096, 32, mlp_dim=14336),
        "llama3.1_70b": size(_LLAMA31, 80, 8192, 64, mlp_dim=28672),
        "llama3.1_405b": size(_LLAMA31, 126, 16384, 128, mlp_dim=53248),
        "llama3.2_1b": size(_LLAMA32, 16, 2048, 32, mlp_dim=8192),
        "llama3.2_3b": size(_LLAMA32, 28, 3072, 24, mlp_dim=8192),
        "smollm2_135m": size(_SMOLLM2, 30, 576, 9, mlp_dim=1536, num_kv_heads=3),
        "smollm2_360m": size(_SMOLLM2, 32, 960, 15, mlp_dim=2560, num_kv_heads=5),
        "smollm2_1.7b": size(_SMOLLM2, 24, 2048, 32, mlp_dim=8192, rope_theta=130000.0),
    },
    rotary=True,
    read=_read,
    write=_write,
)

_FIXED = dict(position="rotary", norm="rmsnorm", bias=False)
_7B = size(_COMMON, 32, 4096, 32, num_kv_heads=8, mlp_dim=14336, max_sequence_length=32768)
_NEMO = dict(num_layers=40, embed_dim=5120, head_dim=128, vocab_size=131072, max_sequence_length=131072)
_MIXTRAL = _7B | dict(vocab_size=32000, rope_theta=1e6, head_dim=128, experts=dict(num_experts=8, experts_per_token=2))
_DEFAULTS = size({}, 32, 4096, 32, vocab_size=32000, num_kv_heads=8, mlp_dim=14336, max_sequence_length=131072)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    keys=(
        *decoder_keys(_DEFAULTS | dict(sliding_window=4096)),
        *ignored("layer_types"),
        *rope_keys(10000.0),
    ),
    tensors=tensors,
    fixed=_FIXED,
    rotary=True,
    sizes={
        "mistral_7b_v0.1": _7B | dict(vocab_size=32000, rope_theta=10000.0, sliding_window=4096),
        "mistral_7b_v0.3": _7B | dict(vocab_size=32768, rope_theta=1e6),
        "mistral_nemo_12b": _7B | _NEMO | dict(rope_theta=1e6),
    },
)


def read_experts(_: Mapping[str, Any], file: Mapping[str, Any], count: str = "num_local_experts") -> dict[str, Any]:
    """Returns our key `experts`; `count` is the key that says how many there are. Weights of a token sum to 1."""
    said = dict(num_experts=file[count], experts_per_token=file["num_experts_per_tok"], normalize_weights=True)
    return dict(experts=said)


def write_experts(model: Mapping[str, Any], count: str = "num_local_experts") -> dict[str, Any]:
    """Returns the inverse of `read_experts`; nothing for a model without experts."""
    experts = model["experts"]
    return {count: experts["num_experts"], "num_experts_per_tok": experts["experts_per_token"]} if experts else {}


def _mixtral_tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    moe = "block_sparse_moe"
    experts = expert_blocks(model, f"{moe}.gate", f"{moe}.experts.{{expert}}", gate="w1", down="w2", up="w3")
    return decoder(model, [*block_rows(model, ATTENTION), *experts])


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    keys=(
        *decoder_keys(_DEFAULTS | dict(norm_epsilon=1e-5, sliding_window=None)),
        own("num_local_experts", 8),
        own("num_experts_per_tok", 2),
        *rope_keys(1e6),
        fixed("router_jitter_noise", 0.0, 0),
        *ignored("router_aux_loss_coef", "output_router_logits"),
    ),
    tensors=_mixtral_tensors,
    fixed=_FIXED,
    rotary=True,
    read=read_experts,
    write=write_experts,
    sizes={
        "mixtral_8x7b": _MIXTRAL,
        "mixtral_8x22b": size(_MIXTRAL, 56, 6144, 48, mlp_dim=16384, max_sequence_length=65536),
    },
)
