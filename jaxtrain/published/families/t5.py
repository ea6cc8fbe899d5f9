"""T5, and T5 1.1 with Flan-T5. No jax here.

Sources: Raffel et al. 2020, section 3.7; Chung et al. 2022; the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.entries import Entry, Row, Skipped, Tied, in_layers
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, Own, read_keys, write_keys
from jaxtrain.published.transforms import copy, linear

_FIXED = dict(
    kind="encoder_decoder", position="relative", norm="rmsnorm", attention_scale=1.0, bias=False,
)  # fmt: skip
_COMMON = _FIXED | dict(
    vocab_size=32128, max_sequence_length=512, relative_buckets=32, relative_max_distance=128, norm_epsilon=1e-6,
)  # fmt: skip


def _t5(layers: int, width: int, heads: int, head_dim: int, mlp: int) -> dict[str, Any]:
    """Returns a row of T5, whose logits are scaled because the embedding is the output layer too."""
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, head_dim=head_dim, mlp_dim=mlp)
    return _COMMON | sizes | dict(activation="relu", tie_embeddings=True, logits_scale=width**-0.5)


def _flan(layers: int, width: int, heads: int, mlp: int) -> dict[str, Any]:
    """Returns a row of Flan-T5, whose MLP has a gate and whose output layer is its own."""
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, head_dim=64, mlp_dim=mlp)
    return _COMMON | sizes | dict(activation="geglu", tie_embeddings=False)


SIZES: dict[str, dict[str, Any]] = {
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
}

# Word of config.json -> ours; "gelu" alone is the one by the error function, gated or called new the tanh form.
_ACTIVATIONS = {
    "relu": "relu", "gated-gelu": "geglu", "gated-silu": "swiglu", "gelu": "gelu_exact", "gelu_new": "gelu",
}  # fmt: skip

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=32128),
    Mapped("d_model", to="embed_dim", default=512),
    Mapped("d_kv", to="head_dim", default=64),
    Mapped("d_ff", to="mlp_dim", default=2048),
    Mapped("num_layers", to="num_layers", default=6),
    Mapped("num_decoder_layers", to="num_decoder_layers", default=lambda file: file["num_layers"]),
    Mapped("num_heads", to="num_heads", default=8),
    Mapped("n_positions", to="max_sequence_length", default=512),
    Mapped("relative_attention_num_buckets", to="relative_buckets", default=32),
    Mapped("relative_attention_max_distance", to="relative_max_distance", default=128),
    Mapped("layer_norm_epsilon", to="norm_epsilon", default=1e-6),
    Mapped("feed_forward_proj", to="activation", default="relu", values=_ACTIVATIONS),
    Mapped("dropout_rate", to="dropout", default=0.1),
    Mapped("decoder_start_token_id", to="start_token", default=0),
    Own("tie_word_embeddings", default=True),
    Own("scale_decoder_outputs", default=None),
    Fixed("is_encoder_decoder", (True,), reason="it would leave one of the two stacks out"),
    Ignored("dense_act_fn", reason="follows from feed_forward_proj"),
    Ignored("is_gated_act", reason="follows from feed_forward_proj"),
    Ignored("output_past", reason="chooses what old versions of transformers return"),
    Ignored("classifier_dropout", reason="it is a head's, in training"),
)  # fmt: skip


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, file = read_keys(KEYS, config, family="t5")
    # transformers 5 writes tie_word_embeddings: true for all of them, and tells the two kinds apart by the other key.
    tied, scaled = file["tie_word_embeddings"] is not False, file["scale_decoder_outputs"]
    scaled = tied if scaled is None else bool(scaled)
    width = ours["embed_dim"]
    assert isinstance(width, int)
    return (
        _FIXED
        | ours
        | dict(
            num_kv_heads=ours["num_heads"],
            tie_embeddings=tied and scaled,
            logits_scale=width**-0.5 if scaled else None,
        )
    )


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    return (
        dict(architectures=["T5ForConditionalGeneration"], model_type="t5", is_encoder_decoder=True)
        | write_keys(KEYS, model)
        | dict(tie_word_embeddings=model["tie_embeddings"], scale_decoder_outputs=model["logits_scale"] is not None)
        | dict(pad_token_id=0)
    )


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, V, N, H = (int(model[key]) for key in ("embed_dim", "vocab_size", "relative_buckets", "num_heads"))
    layers = {"encoder": model["num_layers"], "decoder": model["num_decoder_layers"]}
    rows: list[Row] = [
        Entry("embedding", "shared.weight", copy(V, D)),
        Tied("lm_head.weight", "embedding", copy(V, D))
        if model["tie_embeddings"]
        else Entry("output", "lm_head.weight", linear((D,), (V,))),
    ]
    for side, count in layers.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        blocks = in_layers(_block(model, crosses=side == "decoder"), f"{side}.block.{{layer}}.layer.", int(count))
        rows += [
            Tied(f"{side}.embed_tokens.weight", "embedding", copy(V, D), instead="a model with one embedding"),
            Entry(f"{side}/relative_positions", bias, copy(N, H)),
            *(Entry(f"{side}/blocks/{row.path}", row.names, row.transform, row.stack) for row in blocks),
            Entry(f"{side}/output_norm/scale", f"{side}.final_layer_norm.weight", copy(D)),
        ]
    unused = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    return (*rows, Skipped(unused, "attention to the encoder knows no distances"))


def _block(model: Mapping[str, Any], *, crosses: bool) -> list[Entry]:
    """Returns the rows of one block, whose parts the files number in the order in which they are applied."""
    D, F = int(model["embed_dim"]), int(model["mlp_dim"])
    heads = (int(model["num_heads"]), int(model["head_dim"]))
    parts = {"attention": "SelfAttention"} | ({"cross_attention": "EncDecAttention"} if crosses else {})
    rows: list[Entry] = []
    for number, (ours, theirs) in enumerate(parts.items()):
        rows += [
            Entry(f"{ours}_norm/scale", f"{number}.layer_norm.weight", copy(D)),
            *(
                Entry(f"{ours}/{name}/kernel", f"{number}.{theirs}.{name[0]}.weight", linear((D,), heads))
                for name in ("query", "key", "value")
            ),
            Entry(f"{ours}/output/kernel", f"{number}.{theirs}.o.weight", linear(heads, (D,))),
        ]
    number = len(parts)
    gated = model["activation"] in ("geglu", "swiglu")
    up = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    return [
        *rows,
        Entry("mlp_norm/scale", f"{number}.layer_norm.weight", copy(D)),
        *(
            Entry(f"mlp/{ours}/kernel", f"{number}.DenseReluDense.{theirs}.weight", linear((D,), (F,)))
            for ours, theirs in up.items()
        ),
        Entry("mlp/down/kernel", f"{number}.DenseReluDense.wo.weight", linear((F,), (D,))),
    ]


FAMILY = Family(
    name="t5",
    model_type="t5",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
