"""Granite 3.0 and 3.3, the dense models. No jax here.

Sources: the config.json published with each model (the base models).
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import Family, decoder_keys, own, rope_keys, size
from jaxtrain.families.llama import BIAS_KEYS, read_bias, tensors, write_bias

_FIXED = dict(position="rotary", norm="rmsnorm")
_COMMON = _FIXED | dict(
    vocab_size=49155, max_sequence_length=4096, rope_theta=10000.0, norm_epsilon=1e-5, activation="swiglu", bias=False,
    tie_embeddings=True, num_kv_heads=8, embedding_scale=12.0, residual_scale=0.22,
)  # fmt: skip
_3_3 = dict(vocab_size=49159, max_sequence_length=131072, rope_theta=1e7)
# Attention is scaled by 1 / head_dim, where the usual scale is 1 / sqrt(head_dim).
_2B = size(_COMMON, 40, 2048, 32, mlp_dim=8192, attention_scale=1 / 64, logits_scale=1 / 8)
_8B = size(_COMMON, 40, 4096, 32, mlp_dim=12800, attention_scale=1 / 128, logits_scale=1 / 16)


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    scales = dict(embedding_scale=file["embedding_multiplier"], residual_scale=file["residual_multiplier"])
    found = {key: None if scale == 1 else float(scale) for key, scale in scales.items()}
    attention, divisor = float(file["attention_multiplier"]), file["logits_scaling"]
    found["attention_scale"] = None if math.isclose(attention, file["head_dim"] ** -0.5) else attention
    return found | dict(logits_scale=None if divisor == 1 else 1 / divisor) | read_bias(file)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    divisor = 1 / (model["logits_scale"] or 1)
    return write_bias(model) | dict(
        embedding_multiplier=model["embedding_scale"] or 1.0,
        residual_multiplier=model["residual_scale"] or 1.0,
        attention_multiplier=model["attention_scale"] or model["head_dim"] ** -0.5,
        logits_scaling=float(round(divisor)) if math.isclose(divisor, round(divisor)) else divisor,
    )


FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    keys=(
        *decoder_keys(
            size({}, 32, 4096, 32, vocab_size=32000, mlp_dim=11008, max_sequence_length=2048), write_head_dim=False
        ),
        *(own(name, 1.0) for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier")),
        *(own("logits_scaling", 1.0), *rope_keys(10000.0), *BIAS_KEYS),
    ),
    tensors=tensors,
    fixed=_FIXED,
    rotary=True,
    read=_read,
    write=_write,
    sizes={"granite3.0_2b": _2B, "granite3.0_8b": _8B, "granite3.3_2b": _2B | _3_3, "granite3.3_8b": _8B | _3_3},
)
