"""T5, and T5 1.1 with Flan-T5. No jax here.

Sources: Raffel et al. 2020, section 3.7; Chung et al. 2022; the config.json published with each model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxtrain.families.family import Family, fixed, ignored, mapped, own, size, size_keys
from jaxtrain.formats.rows import Entry, Row, Skipped, Tied, block_rows, copy, dims, in_layers, output_row

_FIXED = dict(kind="encoder_decoder", position="relative", norm="rmsnorm", attention_scale=1.0, bias=False)
_COMMON = _FIXED | dict(
    vocab_size=32128, max_sequence_length=512, relative_buckets=32, relative_max_distance=128, norm_epsilon=1e-6,
)  # fmt: skip
_NAMES = dict(
    embed_dim="d_model", head_dim="d_kv", mlp_dim="d_ff", num_layers="num_layers", num_heads="num_heads",
    max_sequence_length="n_positions", norm_epsilon="layer_norm_epsilon",
)  # fmt: skip


def _t5(layers: int, width: int, heads: int, head_dim: int, mlp: int) -> dict[str, Any]:
    """A size of T5, whose logits are scaled because the embedding is the output layer too."""
    own = dict(activation="relu", tie_embeddings=True, logits_scale=width**-0.5)
    return size(_COMMON, layers, width, heads, head_dim=head_dim, mlp_dim=mlp, **own)


def _flan(layers: int, width: int, heads: int, mlp: int) -> dict[str, Any]:
    """A size of Flan-T5, whose MLP has a gate and whose output layer is its own."""
    return size(_COMMON, layers, width, heads, head_dim=64, mlp_dim=mlp, activation="geglu", tie_embeddings=False)


# "gelu" alone is the one by the error function, gated or called new the tanh form.
_ACTIVATIONS = {
    "relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu", "gelu": "gelu_exact", "gelu_new": "gelu",
}  # fmt: skip


def _read(ours: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes tie_word_embeddings: true for all of them, and tells the two kinds apart by the other key.
    tied, scaled = file["tie_word_embeddings"] is not False, file["scale_decoder_outputs"]
    scaled = tied if scaled is None else bool(scaled)
    scale = ours["embed_dim"] ** -0.5 if scaled else None
    return dict(num_kv_heads=ours["num_heads"], tie_embeddings=tied and scaled, logits_scale=scale)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    scaled = model["logits_scale"] is not None
    tied = dict(tie_word_embeddings=model["tie_embeddings"], scale_decoder_outputs=scaled)
    return dict(is_encoder_decoder=True, **tied, pad_token_id=0)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    (D, V, H), N = dims(model, "DVH"), int(model["relative_buckets"])
    layers = {"encoder": model["num_layers"], "decoder": model["num_decoder_layers"]}
    rows: list[Row] = [
        Entry("embedding", "shared.weight", copy(V, D)),
        output_row(model, "lm_head.weight"),
    ]
    for side, count in layers.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        blocks = in_layers(_block(model, crosses=side == "decoder"), f"{side}.block.{{layer}}.layer.", int(count))
        rows += [
            Tied(f"{side}.embed_tokens.weight", "embedding", copy(V, D)),
            Entry(f"{side}/relative_positions", bias, copy(N, H)),
            *(replace(row, path=f"{side}/blocks/{row.path}") for row in blocks),
            Entry(f"{side}/output_norm/scale", f"{side}.final_layer_norm.weight", copy(D)),
        ]
    # Attention to the encoder knows no distances.
    return (*rows, Skipped(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"))


def _block(model: Mapping[str, Any], *, crosses: bool) -> list[Entry]:
    """The rows of one block, whose parts the files number in the order in which they are applied."""
    parts = {"attention": "SelfAttention"} | ({"cross_attention": "EncDecAttention"} if crosses else {})
    names: dict[str, str] = {}
    for number, (ours, theirs) in enumerate(parts.items()):
        names[f"{ours}_norm"] = f"{number}.layer_norm"
        names |= {f"{ours}/{one}": f"{number}.{theirs}.{one[0]}" for one in ("query", "key", "value", "output")}
    mlp = f"{len(parts)}.DenseReluDense"
    gated = model["activation"] in ("geglu", "swiglu")
    names["mlp_norm"] = f"{len(parts)}.layer_norm"
    names |= {"mlp/gate": f"{mlp}.wi_0", "mlp/up": f"{mlp}.wi_1"} if gated else {"mlp/up": f"{mlp}.wi"}
    return block_rows(model, names | {"mlp/down": f"{mlp}.wo"}, prefix="")


FAMILY = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    keys=(
        *size_keys(size(_COMMON, 6, 512, 8, head_dim=64), _NAMES),
        mapped("num_decoder_layers", "num_decoder_layers", lambda file: file["num_layers"]),
        mapped("relative_attention_num_buckets", "relative_buckets", 32),
        mapped("relative_attention_max_distance", "relative_max_distance", 128),
        mapped("feed_forward_proj", "activation", "relu", _ACTIVATIONS),
        mapped("dropout_rate", "dropout", 0.1),
        mapped("decoder_start_token_id", "start_token", 0),
        own("tie_word_embeddings", True),
        own("scale_decoder_outputs"),
        fixed("is_encoder_decoder", True),
        *ignored("dense_act_fn", "is_gated_act", "output_past", "classifier_dropout"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=_read,
    write=_write,
    sizes={
        "t5_small": _t5(6, 512, 8, 64, 2048),
        "t5_base": _t5(12, 768, 12, 64, 3072),
        "t5_large": _t5(24, 1024, 16, 64, 4096),
        "t5_3b": _t5(24, 1024, 32, 128, 16384),
        "t5_11b": _t5(24, 1024, 128, 128, 65536),
        "flan_t5_small": _flan(8, 512, 6, 1024),
        "flan_t5_base": _flan(12, 768, 12, 2048),
        "flan_t5_large": _flan(24, 1024, 16, 2816),
        "flan_t5_xl": _flan(24, 2048, 32, 5120),
        "flan_t5_xxl": _flan(24, 4096, 64, 10240),
    },
)
