"""GPT-J, by Wang and Komatsuzaki 2021 and the config.json published with the model. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, fixed, no_ids, own, size
from jaxtrain.families.gpt2 import gpt2_keys
from jaxtrain.formats.rows import Entry, Row, Skipped, block_rows, copy, dims, in_layers, output_row

_BIASES = dict(bias="mlp", norm_bias=True, output_bias=True)
_FIXED = dict(position="rotary", rotary_interleaved=True, norm="layernorm", block="parallel_one_norm", **_BIASES)
_ROWS = dict(vocab_size=50400, max_sequence_length=2048, tie_embeddings=False)
_COMMON = _FIXED | _ROWS | dict(activation="gelu", norm_epsilon=1e-5, rope_theta=10000.0)
_NAMES = {
    "attention_norm": "ln_1", "attention/query": "attn.q_proj", "attention/key": "attn.k_proj",
    "attention/value": "attn.v_proj", "attention/output": "attn.out_proj", "mlp/up": "mlp.fc_in",
    "mlp/down": "mlp.fc_out",
}  # fmt: skip


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    rotary = round(model["rotary_fraction"] * model["head_dim"])
    return dict(rotary_dim=rotary) | no_ids(model, bos_token_id=50256, eos_token_id=50256)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    D, L, V = dims(model, "DLV")
    return (
        Entry("embedding", "transformer.wte.weight", copy(V, D)),
        *in_layers(block_rows(model, _NAMES, beside=True), "transformer.h.{layer}.", L),
        *block_rows(model, {"output_norm": "transformer.ln_f"}, prefix="", beside=True),
        output_row(model, "lm_head.weight"),
        Entry("output_bias", "lm_head.bias", copy(V)),
        Skipped(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask
    )


FAMILY = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    keys=(
        *gpt2_keys(size(_COMMON, 28, 4096, 16)),
        own("rotary_dim", 64),
        fixed("rotary", True),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    read=lambda _, file: dict(rotary_fraction=file["rotary_dim"] * file["n_head"] / file["n_embd"]),
    write=_write,
    sizes={"gptj_6b": size(_COMMON, 28, 4096, 16, rotary_fraction=0.25)},
)
