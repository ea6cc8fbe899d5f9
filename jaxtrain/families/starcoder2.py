"""StarCoder2. No jax here.

Sources: Lozhkov et al. 2024, and the config.json published with each model.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, fixed, gelu_key, ignored, no_ids, rope_keys, size
from jaxtrain.families.llama import ATTENTION, decoder
from jaxtrain.formats.rows import Row, block_rows

_FIXED = dict(position="rotary", norm="layernorm", bias=True)
_COMMON = _FIXED | dict(
    vocab_size=49152, max_sequence_length=16384, sliding_window=4096, norm_epsilon=1e-5, activation="gelu",
    tie_embeddings=True,
)  # fmt: skip
_DEFAULTS = _COMMON | dict(max_sequence_length=4096, num_kv_heads=2, sliding_window=None)
_NAMES = dict(norm_epsilon="norm_epsilon")
_GELU = gelu_key("hidden_act", "gelu_pytorch_tanh")


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    return dict(use_bias=True) | no_ids(model, bos_token_id=50256, eos_token_id=50256)


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    mlp = block_rows(model, {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}, beside=True)
    return decoder(model, [*block_rows(model, ATTENTION), *mlp])


FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys=(
        *decoder_keys(size(_DEFAULTS, 30, 3072, 24), activation=_GELU, names=_NAMES, write_head_dim=False),
        *rope_keys(10000.0),
        fixed("use_bias", True),
        fixed("norm_type", "layer_norm"),
        fixed("mlp_type", "default"),
        fixed("scale_attn_weights", True),
        *ignored("layer_norm_epsilon", "attention_dropout", "residual_dropout", "embedding_dropout"),
        *ignored("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    ),
    tensors=_tensors,
    fixed=_FIXED,
    rotary=True,
    write=_write,
    # The published count of the largest size, 15,957,889,024, holds an output layer beside the embedding.
    sizes={
        "starcoder2_3b": size(_COMMON, 30, 3072, 24, num_kv_heads=2, mlp_dim=12288, rope_theta=999999.4420358813),
        "starcoder2_7b": size(_COMMON, 32, 4608, 36, num_kv_heads=4, mlp_dim=18432, rope_theta=1000000.0),
        "starcoder2_15b": size(
            _COMMON, 40, 6144, 48, num_kv_heads=4, mlp_dim=24576, rope_theta=100000.0, tie_embeddings=False
        ),
    },
)
