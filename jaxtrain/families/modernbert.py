"""ModernBERT: an encoder whose layers see a window or the whole text, with heads. No jax here.

Sources: the config.json published with each model; Warner et al. 2024 (arXiv 2412.13663).
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.families.bert import label_rows, read_head, write_head
from jaxtrain.families.family import (
    HEAD_KEYS,
    Family,
    Key,
    fixed,
    head_kind,
    ignored,
    mapped,
    no_ids,
    own,
    size,
    size_keys,
)
from jaxtrain.formats.rope import read_windows, write_windows
from jaxtrain.formats.rows import Entry, Row, Tied, block_rows, copy, dims, fused, in_layers, linear, prefixed

_FIXED = dict(position="rotary", norm="layernorm", embedding_norm="first_layer", bias=False, causal=False)
_SIZES = dict(vocab_size=50368, max_sequence_length=8192, norm_epsilon=1e-5)
_COMMON = _FIXED | _SIZES | dict(
    rope_theta=160000.0, activation="geglu_exact", tie_embeddings=True,
    local_layers=dict(pattern=(0, 1, 1), window=65, rope_theta=10000.0),
    head=dict(kind="masked_language_model", hidden="gelu_exact", bias="output"),
)  # fmt: skip
_GATES = {"gelu": "geglu_exact", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu"}
# Kind of layer -> the older key of its theta.
_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def _read(ours: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    kinds, every, said = (*_THETAS,), file["global_attn_every_n_layers"], file["rope_parameters"] or {}
    types = file["layer_types"] or [kinds[layer % every != 0] for layer in range(ours["num_layers"])]
    if any(one.get("rope_type", "default") != "default" for one in said.values()):
        raise ConfigError(f"config.json has rope_parameters: {said}; of modernbert only rope_type: default is known")
    whole, local = (float(said.get(kind, {}).get("rope_theta", file[key])) for kind, key in _THETAS.items())
    # Half of local_attention to each side; ours counts the own position too.
    found = read_windows(types, file["local_attention"] // 2 + 1)
    if found["local_layers"] is not None:
        found["local_layers"]["rope_theta"] = local
    found["rope_theta"] = local if found["sliding_window"] else whole
    rate = file["classifier_dropout"]
    head = read_head(file, "ModernBert", masked="gelu_exact", text="gelu_exact", pooled=None, dropout=rate)
    if head["kind"] != "embedding":
        head |= dict(hidden="gelu_exact", hidden_norm=head["kind"] != "masked_language_model", bias="output")
    if head["kind"] in ("sequence", "regression"):
        head |= dict(pooling={"cls": "first", "mean": "mean"}[file["classifier_pooling"]])
    return found | dict(head=head)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    windows, local, head = write_windows(model), model["local_layers"], model["head"] or {}
    window = windows["sliding_window"]
    return no_ids(model, pad_token_id=50283) | dict(
        layer_types=windows["layer_types"],
        global_attn_every_n_layers=1 if local is None else len(local["pattern"]),  # of readers before layer_types
        local_attention=128 if window is None else 2 * (window - 1),
        classifier_pooling="mean" if head.get("pooling") == "mean" else "cls",
        global_rope_theta=model["rope_theta"],
        local_rope_theta=(local or {}).get("rope_theta") or model["rope_theta"],
        **write_head(model, "ModernBert") | dict(classifier_dropout=head.get("dropout", 0.0)),
    )


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, V, L = dims(model, "DVL")
    blocks = [
        *fused(model, "attn.Wqkv.weight", "attention/query", "attention/key", "attention/value"),
        *fused(model, "mlp.Wi.weight", "mlp/gate", "mlp/up"),
        *block_rows(model, {"attention/output": "attn.Wo", "mlp_norm": "mlp_norm", "mlp/down": "mlp.Wo"}),
        Entry("blocks/attention_norm/scale", "attn_norm.weight", copy(D), first_names=("embeddings.norm.weight",)),
    ]
    encoder = (
        Entry("embedding", "embeddings.tok_embeddings.weight", copy(V, D)),
        *in_layers(blocks, "layers.{layer}.", L),
        Entry("output_norm/scale", "final_norm.weight", copy(D)),
    )
    if head_kind(model) == "embedding":
        return prefixed(encoder, written="", read=("model.",))
    last, (dense, norm) = label_rows(model, "classifier"), ("hidden", "hidden_norm")
    if head_kind(model) == "masked_language_model":
        last = (Entry("head/bias", "decoder.bias", copy(V)), Tied("decoder.weight", "embedding", copy(V, D)))
        dense, norm = "dense", "norm"
    kernel = Entry(f"head/{dense}/kernel", "head.dense.weight", linear((D,), (D,)))
    scale = Entry(f"head/{norm}/scale", "head.norm.weight", copy(D))
    return (*prefixed(encoder, written="model.", read=("",)), kernel, scale, *last)


FAMILY = Family(
    name="modernbert",
    architecture="ModernBertModel",
    keys=(
        *size_keys(size(_SIZES, 22, 768, 12, mlp_dim=1152), dict(norm_epsilon="norm_eps")),
        mapped("hidden_activation", "activation", "gelu", _GATES),
        Key("tie_word_embeddings", True, "tie_embeddings", allowed=(True,)),
        *(fixed(f"{part}_bias", False) for part in ("norm", "attention", "mlp", "classifier")),
        *(fixed(f"{part}_dropout", 0.0, 0) for part in ("attention", "embedding", "mlp")),
        *(fixed("decoder_bias", True), fixed("classifier_activation", "gelu"), fixed("rope_scaling", None)),
        *(own("classifier_dropout", 0.0), fixed("classifier_pooling", "cls", "mean")),
        *(own("global_rope_theta", 160000.0), own("local_rope_theta", 10000.0), own("rope_parameters")),
        *(own("global_attn_every_n_layers", 3), own("local_attention", 128), own("layer_types")),
        *ignored("initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile", "layer_norm_eps",
                 "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index", "position_embedding_type"),
        *HEAD_KEYS,
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=_read,
    write=_write,
    sizes={
        "modernbert_base": size(_COMMON, 22, 768, 12, mlp_dim=1152),
        "modernbert_large": size(_COMMON, 28, 1024, 16, mlp_dim=2624),
    },
)  # fmt: skip
