"""GPT-2. No jax here.

Sources: Radford et al. 2019 (openai/gpt-2 hparams), and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, Key, fixed, gelu_key, ignored, no_ids, size, size_keys
from jaxtrain.formats.rows import (
    Entry,
    Row,
    Skipped,
    block,
    block_rows,
    conv1d,
    copy,
    dims,
    in_layers,
    normed,
    output_row,
    prefixed,
    vector,
)

_FIXED = dict(position="learned", norm="layernorm", bias=True)
_COMMON = _FIXED | dict(
    vocab_size=50257, max_sequence_length=1024, activation="gelu", tie_embeddings=True, norm_epsilon=1e-5,
)  # fmt: skip
_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
_SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


def gpt2_keys(defaults: Mapping[str, Any]) -> tuple[Key, ...]:
    """Returns the keys of GPT-2 and GPT-J, with the defaults by our names."""
    names = dict(embed_dim="n_embd", num_layers="n_layer", num_heads="n_head", mlp_dim="n_inner")
    names |= dict(max_sequence_length="n_positions", norm_epsilon="layer_norm_epsilon")
    return (
        *size_keys({**defaults, "mlp_dim": lambda file: 4 * int(file["n_embd"])}, names),
        gelu_key("activation_function", "gelu_new", "gelu_new"),
        fixed("scale_attn_weights", True),
        *ignored(*_DROPOUT, *(f"summary_{name}" for name in _SUMMARY)),
    )


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    # Rates of training whose defaults are not 0, and which a program that trains the model further would take over.
    return {name: 0.0 for name in _DROPOUT} | no_ids(model, bos_token_id=50256, eos_token_id=50256)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, H, K, L, V, P = dims(model, "DHKLVP")
    fused: list[Entry] = []
    for at, name in enumerate(("query", "key", "value")):
        kernel = block(conv1d((D,), (H, K)), dim=1, start=at * D, of=3 * D)
        fused.append(Entry(f"blocks/attention/{name}/kernel", "attn.c_attn.weight", kernel))
        bias = block(vector(H, K), dim=0, start=at * D, of=3 * D)
        fused.append(Entry(f"blocks/attention/{name}/bias", "attn.c_attn.bias", bias))
    names = {"attention/output": "attn.c_proj", "mlp_norm": "ln_2", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    rows = normed("blocks/attention_norm", "ln_1", D) + fused
    rows += block_rows(model, names, kernel=conv1d, beside=True)
    body: tuple[Row, ...] = (
        Entry("embedding", "wte.weight", copy(V, D)),
        Entry("positions", "wpe.weight", copy(P, D)),
        *in_layers(rows, "h.{layer}.", L),
        *normed("output_norm", "ln_f", D),
        Skipped(r"h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask
    )
    # The folders of the four published sizes have no prefix.
    return (*prefixed(body, written="transformer.", read=("transformer.", "")), output_row(model, "lm_head.weight"))


FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    keys=(
        *gpt2_keys(size(_COMMON, 12, 768, 12)),
        fixed("scale_attn_by_inverse_layer_idx", False),
        *ignored("reorder_and_upcast_attn", "n_ctx"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    write=_write,
    sizes={
        "gpt2": size(_COMMON, 12, 768, 12),
        "gpt2_medium": size(_COMMON, 24, 1024, 16),
        "gpt2_large": size(_COMMON, 36, 1280, 20),
        "gpt2_xl": size(_COMMON, 48, 1600, 25),
    },
)
