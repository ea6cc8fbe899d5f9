"""Llama 2, 3, 3.1 and 3.2, and SmolLM2. No jax here.

Sources: the config.json published with each model (the base models).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.interop.families.family import Family, labels_of, read_labels
from jaxtrain.interop.families.keys import HEAD_KEYS, decoder_keys, fixed, rope_keys, split_width
from jaxtrain.interop.formats.entries import Entry, Row, Skipped, Tied, in_layers
from jaxtrain.interop.formats.transforms import copy, linear, vector

_COMMON = dict(
    position="rotary", norm="rmsnorm", norm_epsilon=1e-5, activation="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip
_LLAMA2 = _COMMON | dict(vocab_size=32000, max_sequence_length=4096, rope_theta=10000.0)
_LLAMA3 = _COMMON | dict(vocab_size=128256, max_sequence_length=8192, rope_theta=500000.0, num_kv_heads=8)
_ROPE31 = dict(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
_LLAMA31 = _LLAMA3 | dict(max_sequence_length=131072, rope_scaling=_ROPE31)
_LLAMA32 = _LLAMA31 | dict(tie_embeddings=True, rope_scaling=_ROPE31 | dict(factor=32.0))
_SMOLLM2 = _COMMON | dict(vocab_size=49152, max_sequence_length=8192, rope_theta=100000.0, tie_embeddings=True)


def _row(family: Mapping[str, Any], layers: int, width: int, heads: int, **more: object) -> dict[str, Any]:
    return {**family} | dict(num_layers=layers, embed_dim=width, num_heads=heads) | more


SIZES: dict[str, dict[str, Any]] = {
    "llama2_7b": _row(_LLAMA2, 32, 4096, 32, mlp_dim=11008),
    "llama2_13b": _row(_LLAMA2, 40, 5120, 40, mlp_dim=13824),
    "llama2_70b": _row(_LLAMA2, 80, 8192, 64, mlp_dim=28672, num_kv_heads=8),
    "llama3_8b": _row(_LLAMA3, 32, 4096, 32, mlp_dim=14336),
    "llama3_70b": _row(_LLAMA3, 80, 8192, 64, mlp_dim=28672),
    "llama3.1_8b": _row(_LLAMA31, 32, 4096, 32, mlp_dim=14336),
    "llama3.1_70b": _row(_LLAMA31, 80, 8192, 64, mlp_dim=28672),
    "llama3.1_405b": _row(_LLAMA31, 126, 16384, 128, mlp_dim=53248),
    "llama3.2_1b": _row(_LLAMA32, 16, 2048, 32, mlp_dim=8192),
    "llama3.2_3b": _row(_LLAMA32, 28, 3072, 24, mlp_dim=8192),
    "smollm2_135m": _row(_SMOLLM2, 30, 576, 9, mlp_dim=1536, num_kv_heads=3),
    "smollm2_360m": _row(_SMOLLM2, 32, 960, 15, mlp_dim=2560, num_kv_heads=5),
    "smollm2_1.7b": _row(_SMOLLM2, 24, 2048, 32, mlp_dim=8192, rope_theta=130000.0),
}
KEYS = (
    *decoder_keys(
        32000, 4096, 11008, 32, 32, lambda file: file["num_attention_heads"], split_width, 2048,
        norm_epsilon=1e-6, tied=False,
    ),
    *rope_keys(10000.0),
    *HEAD_KEYS,
    fixed("attention_bias", False, True),
    fixed("mlp_bias", False, True),
    fixed("pretraining_tp", 1),
    fixed("rope_interleaved", False),
    fixed("is_llama_config", True),
)  # fmt: skip
_LABELLED = "LlamaForSequenceClassification"


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the biases, and the head: labels of a text, read at its last token, where the architecture says so."""
    if file["attention_bias"] != file["mlp_bias"]:
        raise ConfigError(
            f"config.json has attention_bias: {file['attention_bias']} and mlp_bias: {file['mlp_bias']}, which the "
            "family llama supports only when they are equal"
        )
    biases = dict(bias=file["attention_bias"])
    if list(file["architectures"] or ()) != [_LABELLED]:
        return biases
    labels = read_labels(file)
    kind = "regression" if file["problem_type"] == "regression" or labels == 1 else "sequence"
    return biases | dict(head=dict(kind=kind, num_labels=labels, pooling="last", bias=False))


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    said = dict(attention_bias=model["bias"], mlp_bias=model["bias"])
    kind = head_kind(model)
    if kind not in ("sequence", "regression"):
        return said
    said |= dict(architectures=[_LABELLED], **labels_of(model["head"]["num_labels"]))
    return said | (dict(problem_type="regression") if kind == "regression" else {})


def head_kind(model: Mapping[str, Any]) -> str:
    """Returns the kind of a model's head."""
    return "language_model" if model["head"] is None else model["head"]["kind"]


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    return (*in_decoder([*attention_blocks(model), *mlp_blocks(model)], model), *ends(model))


def ends(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the rows of the embedding, the last norm and the output layer or the head."""
    D, V = (int(model[key]) for key in ("embed_dim", "vocab_size"))
    output: Row = Entry("output", "lm_head.weight", linear((D,), (V,)))
    if head_kind(model) != "language_model":
        output = Entry("head/output/kernel", "score.weight", linear((D,), (int(model["head"]["num_labels"]),)))
    elif model["tie_embeddings"]:
        output = Tied("lm_head.weight", "embedding", copy(V, D))
    return (
        Entry("embedding", "model.embed_tokens.weight", copy(V, D)),
        Entry("output_norm/scale", "model.norm.weight", copy(D)),
        output,
        Skipped(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    )


def in_decoder(rows: Iterable[Entry], model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns rows of one block stacked over the layers of a decoder."""
    return in_layers(rows, "model.layers.{layer}.", int(model["num_layers"]))


def attention_blocks(model: Mapping[str, Any]) -> list[Entry]:
    """Returns the rows of the norms and of attention, of one block."""
    D, H, G, K = (int(model[key]) for key in ("embed_dim", "num_heads", "num_kv_heads", "head_dim"))
    rows = [
        Entry("blocks/attention_norm/scale", "input_layernorm.weight", copy(D)),
        Entry("blocks/attention/query/kernel", "self_attn.q_proj.weight", linear((D,), (H, K))),
        Entry("blocks/attention/key/kernel", "self_attn.k_proj.weight", linear((D,), (G, K))),
        Entry("blocks/attention/value/kernel", "self_attn.v_proj.weight", linear((D,), (G, K))),
        Entry("blocks/attention/output/kernel", "self_attn.o_proj.weight", linear((H, K), (D,))),
        Entry("blocks/mlp_norm/scale", "post_attention_layernorm.weight", copy(D)),
    ]
    if model["qk_norm"]:
        rows += [
            Entry("blocks/attention/query_norm/scale", "self_attn.q_norm.weight", copy(K)),
            Entry("blocks/attention/key_norm/scale", "self_attn.k_norm.weight", copy(K)),
        ]
    if model["bias"]:
        rows += [
            Entry("blocks/attention/query/bias", "self_attn.q_proj.bias", vector(H, K)),
            Entry("blocks/attention/key/bias", "self_attn.k_proj.bias", vector(G, K)),
            Entry("blocks/attention/value/bias", "self_attn.v_proj.bias", vector(G, K)),
        ]
    if model["bias"] is True:
        rows.append(Entry("blocks/attention/output/bias", "self_attn.o_proj.bias", copy(D)))
    return rows


def mlp_blocks(model: Mapping[str, Any]) -> list[Entry]:
    """Returns the rows of the MLP, of one block."""
    D, F = int(model["embed_dim"]), int(model["mlp_dim"])
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    rows = [
        Entry(f"blocks/mlp/{name}/kernel", f"mlp.{name}_proj.weight", linear((inputs,), (outputs,)))
        for name, (inputs, outputs) in shapes.items()
    ]
    if model["bias"] is True:
        rows += [
            Entry(f"blocks/mlp/{name}/bias", f"mlp.{name}_proj.bias", copy(outputs))
            for name, (_, outputs) in shapes.items()
        ]
    return rows


def expert_blocks(model: Mapping[str, Any], router: str, expert: str, **names: str) -> list[Entry]:
    """Returns the rows of a mixture of experts, of one block.

    Args:
        model: Our model group.
        router, expert: Names of the router and, with {expert}, of an expert.
        names: gate, up and down -> its name in an expert.
    """
    D, F, E = int(model["embed_dim"]), int(model["mlp_dim"]), int(model["experts"]["num_experts"])
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    return [
        Entry("blocks/mlp/router/kernel", f"{router}.weight", linear((D,), (E,))),
        *(
            Entry(f"blocks/mlp/{ours}/kernel", f"{expert}.{name}.weight", linear(*map(_one, shapes[ours])), stack=(E,))
            for ours, name in names.items()
        ),
    ]


def _one(size: int) -> tuple[int]:
    return (size,)


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys=KEYS,
    tensors=tensors,
    fixed=dict(position="rotary", norm="rmsnorm"),
    sizes=SIZES,
    rotary=True,
    read=_read,
    write=_write,
)
