"""GPT-2. No jax here.

Sources: Radford et al. 2019 (openai/gpt-2 hparams), and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.decoder import GELU_TANH, NO_DROPOUT, no_tokens
from jaxtrain.published.entries import Entry, Row, Skipped, Tied, biased, in_layers, normed, prefixed
from jaxtrain.published.family import Family
from jaxtrain.published.keys import Fixed, Ignored, Mapped, read_keys, write_keys
from jaxtrain.published.transforms import block, conv1d, copy, linear, vector

_COMMON = dict(
    vocab_size=50257, max_sequence_length=1024, position="learned", norm="layernorm",
    activation="gelu", tie_embeddings=True, bias=True, norm_epsilon=1e-5,
)  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": _COMMON | dict(num_layers=12, embed_dim=768, num_heads=12),
    "gpt2_medium": _COMMON | dict(num_layers=24, embed_dim=1024, num_heads=16),
    "gpt2_large": _COMMON | dict(num_layers=36, embed_dim=1280, num_heads=20),
    "gpt2_xl": _COMMON | dict(num_layers=48, embed_dim=1600, num_heads=25),
}

_ACTIVATIONS = {name: "gelu" for name in ("gelu_new", *GELU_TANH)} | {"gelu": "gelu_exact", "relu": "relu"}

KEYS = (
    Mapped("vocab_size", to="vocab_size", default=50257),
    Mapped("n_positions", to="max_sequence_length", default=1024),
    Mapped("n_embd", to="embed_dim", default=768),
    Mapped("n_layer", to="num_layers", default=12),
    Mapped("n_head", to="num_heads", default=12),
    Mapped("n_inner", to="mlp_dim", default=lambda file: 4 * int(file["n_embd"])),
    Mapped("activation_function", to="activation", default="gelu_new", values=_ACTIVATIONS),
    Mapped("layer_norm_epsilon", to="norm_epsilon", default=1e-5),
    Mapped("tie_word_embeddings", to="tie_embeddings", default=True),
    Fixed("scale_attn_weights", (True,), reason="it leaves the scores without their scale"),
    Fixed("scale_attn_by_inverse_layer_idx", (False,), reason="it gives each layer a scale of the scores of its own"),
    Ignored("reorder_and_upcast_attn", reason="another order of the same arithmetic"),
    Ignored("n_ctx", reason="n_positions takes its place"),
    *(Ignored(name, reason=NO_DROPOUT) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")),
    *(
        Ignored(f"summary_{name}", reason="a head that GPT2LMHeadModel does not have")
        for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
    ),
)


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family."""
    ours, _ = read_keys(KEYS, config, family="gpt2")
    return dict(kind="transformer", position="learned", norm="layernorm", bias=True) | ours


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    written = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2") | write_keys(KEYS, model)
    # Rates of training whose defaults are not 0, and which a program that trains the model further would take over.
    written |= {name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
    return written | no_tokens(model, bos_token_id=50256, eos_token_id=50256)


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group."""
    D, H, F, L, V, P = (
        int(model[key])
        for key in ("embed_dim", "num_heads", "mlp_dim", "num_layers", "vocab_size", "max_sequence_length")
    )
    K = D // H

    fused: list[Entry] = []
    for at, name in enumerate(("query", "key", "value")):
        kernel = block(conv1d((D,), (H, K)), dim=1, start=at * D, of=3 * D)
        fused.append(Entry(f"blocks/attention/{name}/kernel", "attn.c_attn.weight", kernel))
        bias = block(vector(H, K), dim=0, start=at * D, of=3 * D)
        fused.append(Entry(f"blocks/attention/{name}/bias", "attn.c_attn.bias", bias))
    rows = [
        *normed("blocks/attention_norm", "ln_1", D),
        *fused,
        *biased("blocks/attention/output", "attn.c_proj", conv1d((H, K), (D,)), (D,)),
        *normed("blocks/mlp_norm", "ln_2", D),
        *biased("blocks/mlp/up", "mlp.c_fc", conv1d((D,), (F,)), (F,)),
        *biased("blocks/mlp/down", "mlp.c_proj", conv1d((F,), (D,)), (D,)),
    ]
    body: tuple[Row, ...] = (
        Entry("embedding", "wte.weight", copy(V, D)),
        Entry("positions", "wpe.weight", copy(P, D)),
        *in_layers(rows, "h.{layer}.", L),
        *normed("output_norm", "ln_f", D),
        Skipped(r"h\.\d+\.attn\.(bias|masked_bias)", "the causal mask"),
    )
    output = (
        Tied("lm_head.weight", "embedding", copy(V, D))
        if model["tie_embeddings"]
        else Entry("output", "lm_head.weight", linear((D,), (V,)))
    )
    # The folders of the four published sizes have no prefix.
    return (*prefixed(body, written="transformer.", read=("transformer.", "")), output)


FAMILY = Family(
    name="gpt2",
    model_type="gpt2",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
