"""T5 and Flan-T5 (T5 1.1). No jax here."""

_T5 = dict(
    vocab_size=32128, max_sequence_length=512, position="relative", relative_buckets=32, relative_max_distance=128,
    norm="rmsnorm", norm_epsilon=1e-6, attention_scale=1.0, bias=False, start_token=0,
)  # fmt: skip


def _tied(layers: int, width: int, heads: int, head_dim: int, mlp: int) -> dict[str, object]:
    """A row of T5: logits are those of embeddings of variance 1, scaled by 1 / sqrt(width)."""
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, head_dim=head_dim, mlp_dim=mlp)
    return _T5 | sizes | dict(activation="relu", tie_embeddings=True, logits_scale=width**-0.5)


def _flan(layers: int, width: int, heads: int, mlp: int) -> dict[str, object]:
    """A row of Flan-T5: heads of 64 dims, an MLP with a gate, an output layer of its own."""
    sizes = dict(num_layers=layers, embed_dim=width, num_heads=heads, head_dim=64, mlp_dim=mlp)
    return _T5 | sizes | dict(activation="geglu", tie_embeddings=False)


# Sources: Raffel et al. 2020, section 3.7; Chung et al. 2022; the config.json published with each model.
SIZES: dict[str, dict[str, object]] = {
    "t5_small": _tied(6, 512, 8, 64, 2048),
    "t5_base": _tied(12, 768, 12, 64, 3072),
    "t5_large": _tied(24, 1024, 16, 64, 4096),
    "t5_3b": _tied(24, 1024, 32, 128, 16384),
    "t5_11b": _tied(24, 1024, 128, 128, 65536),
    "flan_t5_small": _flan(8, 512, 6, 1024),
    "flan_t5_base": _flan(12, 768, 12, 2048),
    "flan_t5_large": _flan(24, 1024, 16, 2816),
    "flan_t5_xl": _flan(24, 2048, 32, 5120),
    "flan_t5_xxl": _flan(24, 4096, 64, 10240),
}
