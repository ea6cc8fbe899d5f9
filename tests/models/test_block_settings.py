"""Each setting of the transformer's block against its formula in plain NumPy, in float64, position by position."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.model import LatentConfig, TransformerConfig
from jaxtrain.config.rope import RopeScaling
from jaxtrain.errors import ConfigError
from jaxtrain.models.layers import rotary_frequencies, scaled
from jaxtrain.models.shipped.transformer import transformer

LENGTH, VOCABULARY = 12, 20
SIZES = dict(num_layers=3, embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=10, vocab_size=VOCABULARY)
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))

# Rows of settings that do not hide each other: the formula below has them all.
YARN = dict(kind="yarn", factor=4.0, original_length=64, beta_fast=4.0)
LONGROPE = dict(kind="longrope", short_factors=(1, 1.5, 2), long_factors=(2, 4, 8))
RELATIVE = dict(position="relative", relative_buckets=8, relative_max_distance=10)
LATENT: dict[str, Any] = dict(
    latent=dict(query_rank=5, key_value_rank=7, nope_dim=5, rope_dim=4, value_dim=3, norm_epsilon=0.1),
    num_kv_heads=4,
    head_dim=None,
)
ROWS: dict[str, dict[str, Any]] = {
    "gpt": dict(
        position="learned", max_sequence_length=LENGTH + 2, position_offset=2, norm="layernorm", bias=True,
        activation="gelu", tie_embeddings=True, token_types=2, logits_scale=0.25,
    ),
    "llama": dict(rope_scaling=dict(kind="llama3", factor=8.0, original_length=32), rope_theta=50.0, bias="qkv"),
    "gemma": dict(
        block="sandwich", norm_offset=True, qk_norm=True, activation="geglu", attention_scale=0.9,
        attention_softcap=0.3, logits_softcap=0.5, embedding_scale=3.0,
        local_layers=dict(pattern=(1, 1, 0), window=3, rope_theta=20.0),
    ),
    "yarn": dict(rope_scaling=YARN, rope_theta=50.0, block="parallel", activation="relu"),
    "bert": dict(
        **RELATIVE, causal=False, block="post", norm="layernorm", embedding_norm=True, activation="gelu_exact"
    ),
    "olmo2": dict(block="output", qk_norm="whole", residual_scale=0.3, bias="attention"),
    "gpt_oss": dict(attention_sinks=True, bias="attention", local_layers=dict(pattern=(1, 0), window=3)),
    "cohere2": dict(
        block="parallel_one_norm", norm="layernorm", qk_norm="per_head", rotary_interleaved=True, rotary_fraction=0.7,
        rope_layers=(1, 0), local_layers=dict(pattern=(1, 0), window=3),
    ),
    "deepseek": dict(**LATENT, rope_scaling=YARN, rope_theta=50.0),
    "latent keys and values": dict(
        **LATENT | dict(latent=LATENT["latent"] | dict(query_rank=None)), rotary_interleaved=True,
        local_layers=dict(pattern=(1, 0), window=3),
    ),
    "llama4": dict(
        local_layers=dict(pattern=(1, 1, 0), window=5, chunked=True), rope_layers=(1, 1, 0), qk_norm="rotated",
        norm_epsilon=0.1, rotary_interleaved=True, attention_temperature=dict(scale=0.7, step=4),
        experts=dict(num_experts=4, experts_per_token=1, scores="sigmoid", weigh_inputs=True, shared_dim=5),
    ),
    "chunks of an encoder": dict(causal=False, local_layers=dict(pattern=(0, 1), window=5, chunked=True)),
    "temperature without positions": dict(position="none", attention_temperature=dict(scale=0.7, step=4)),
    "gpt_j": dict(norm="layernorm", bias="mlp", norm_bias=True, output_bias=True, activation="gelu"),
    "longrope, long": dict(rope_scaling=dict(**LONGROPE, original_length=8), sliding_window=4),
    "modernbert": dict(
        causal=False, norm="layernorm", embedding_norm="first_layer", activation="geglu_exact", tie_embeddings=True,
        local_layers=dict(pattern=(0, 1, 1), window=3, rope_theta=20.0), rope_theta=500.0,
    ),
    "electra": dict(
        position="learned", embedding_width=5, embedding_norm=True, norm="layernorm", bias=True, token_types=2,
    ),
    "longrope, short": dict(rope_scaling=dict(**LONGROPE, original_length=16)),
    "relative": RELATIVE,
    "rotary_fraction": dict(rotary_fraction=0.7),
    "linear": dict(rope_scaling=dict(kind="linear", factor=4.0)),
    "yarn, ramp between dims": dict(rope_scaling=dict(**YARN, truncate=False), rope_theta=50.0),
    "yarn, global layers": dict(
        rope_scaling=YARN, rope_theta=50.0, local_layers=dict(pattern=(1, 0), window=3, rope_theta=20.0)
    ),
    "no positions": dict(position="none", local_layers=dict(pattern=(1, 0), window=3)),
}  # fmt: skip
# The others run under --all.
PLAIN = (
    "gpt",
    "llama",
    "gemma",
    "olmo2",
    "gpt_oss",
    "cohere2",
    "deepseek",
    "llama4",
    "yarn",
    "bert",
    "modernbert",
    "longrope, long",
)


def scrambled(params: Any) -> Any:
    """Parameters that are all away from 0 and 1, so that no norm, bias or table is without effect."""
    leaves, tree = jax.tree.flatten(params)
    draws = np.random.default_rng(1)
    return tree.unflatten([np.asarray(0.4 * draws.standard_normal(leaf.shape), np.float32) for leaf in leaves])


def normalized(
    x: np.ndarray,
    params: Any,
    config: TransformerConfig | LatentConfig,
    *,
    kind: str | None = None,
    axes: tuple[int, ...] = (-1,),
    offset: int = 0,
) -> np.ndarray:
    if isinstance(config, TransformerConfig):
        kind, offset = kind or config.norm, config.norm_offset
    centred = x - x.mean(axes, keepdims=True) if kind == "layernorm" else x
    y = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + config.norm_epsilon)
    y = y * (params["scale"] + offset)
    return y + params["bias"] if "bias" in params else y


def frequencies(config: TransformerConfig, local: bool) -> tuple[np.ndarray, float]:
    dims = int(config.head_width * config.rotary_fraction) if config.latent is None else config.latent.rope_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.local_layers is not None and config.local_layers.rope_theta is not None:
        theta, scaling = config.local_layers.rope_theta, None
    plain = np.array([theta ** (-2 * pair / dims) for pair in range(dims // 2)])
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        found = []
        for one in plain:
            turns = scaling.original_length * one / (2 * math.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            smooth = min(max((turns - low) / (high - low), 0), 1)
            found.append((1 - smooth) * one / scaling.factor + smooth * one)
        return np.array(found), 1.0
    if scaling.kind == "longrope":
        divisors = scaling.long_factors if scaling.original_length < LENGTH else scaling.short_factors
        s = config.max_sequence_length / scaling.original_length
        return plain / np.array(divisors), math.sqrt(1 + math.log(s) / math.log(scaling.original_length))
    # YaRN, Peng et al. 2023, section 3.2: gamma by the dim at which a number of rotations fits.
    edges = [
        dims * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.truncate:
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    first, last = max(edges[0], 0), min(edges[1], dims - 1)
    divided = np.clip((np.arange(dims // 2) - first) / (last - first), 0, 1)
    return divided * plain / scaling.factor + (1 - divided) * plain, 0.1 * math.log(scaling.factor) + 1


def rotated(x_K: np.ndarray, position: int, config: TransformerConfig, local: bool) -> np.ndarray:
    speeds, factor = frequencies(config, local)
    y_K, half = x_K.copy(), len(speeds)
    for pair, speed in enumerate(speeds):
        cos, sin = factor * math.cos(position * speed), factor * math.sin(position * speed)
        one, other = (2 * pair, 2 * pair + 1) if config.rotary_interleaved else (pair, pair + half)
        first, second = x_K[one], x_K[other]
        y_K[one], y_K[other] = first * cos - second * sin, second * cos + first * sin
    return y_K


def bucket(distance: int, config: TransformerConfig) -> int:
    """Of the key's position less the query's; Raffel et al. 2020, section 2.1."""
    count, first = config.relative_buckets, 0
    if not config.causal:
        count //= 2
        first = count if distance > 0 else 0
    steps = max(-distance, 0) if config.causal else abs(distance)
    exact = count // 2
    if steps < exact:
        return first + steps
    share = math.log(steps / exact) / math.log(config.relative_max_distance / exact)
    return first + min(exact + int(share * (count - exact)), count - 1)


def of_latents(x_LD: np.ndarray, params: Any, config: TransformerConfig, latent: LatentConfig) -> Any:
    """Queries, keys and values [L, H, .] of latents, rotated dims first; DeepSeek V2, equations 9 to 14."""

    def normed(x_LR: np.ndarray, name: str) -> np.ndarray:
        return normalized(x_LR, params[name], latent, kind="rmsnorm")

    rank, nope = latent.key_value_rank, latent.nope_dim
    c_LQ = x_LD
    if latent.query_rank is not None:
        c_LQ = normed(x_LD @ params["query_latent"]["kernel"], "query_latent_norm")
    q_LHK = np.einsum("lq,qhk->lhk", c_LQ, params["query"]["kernel"])
    beside_LR = x_LD @ params["key_value_latent"]["kernel"]
    c_LR = normed(beside_LR[:, :rank], "key_value_latent_norm")
    kv_LHK = np.einsum("lr,rhk->lhk", c_LR, params["key_value"]["kernel"])
    rope_LHR = np.repeat(beside_LR[:, None, rank:], config.num_heads, axis=1)
    q_LHK = np.concatenate([q_LHK[..., nope:], q_LHK[..., :nope]], -1)
    return q_LHK, np.concatenate([rope_LHR, kv_LHK[..., :nope]], -1), kv_LHK[..., nope:]


def attended(x_LD: np.ndarray, params: Any, tables: Any, config: TransformerConfig, layer: int) -> np.ndarray:
    local = config.local_layers is not None and config.windows[layer] is not None
    if config.latent is not None:
        q_LHK, k_LGK, v_LGK = of_latents(x_LD, params, config, config.latent)
    else:
        q_LHK, k_LGK, v_LGK = (
            np.einsum("ld,dhk->lhk", x_LD, params[name]["kernel"]) + params[name].get("bias", 0)
            for name in ("query", "key", "value")
        )
    if config.qk_norm and config.qk_norm != "rotated":
        kind = config.norm if config.qk_norm == "per_head" else "rmsnorm"
        axes = (-2, -1) if config.qk_norm == "whole" else (-1,)
        q_LHK = normalized(q_LHK, params["query_norm"], config, kind=kind, axes=axes)
        k_LGK = normalized(k_LGK, params["key_norm"], config, kind=kind, axes=axes)
    scale = config.attention_scale or 1 / math.sqrt(config.head_width)
    out_LHK = np.zeros((len(x_LD), config.num_heads, v_LGK.shape[-1]))
    for head in range(config.num_heads):
        group = head * config.kv_heads // config.num_heads
        for at in range(len(x_LD)):
            scores = np.full(len(x_LD), -np.inf)
            for other in range(len(x_LD)):
                if config.causal and other > at:
                    continue
                window = config.windows[layer]
                chunked = config.local_layers is not None and config.local_layers.chunked
                if window is not None and (at // window != other // window if chunked else abs(at - other) >= window):
                    continue
                query, key = q_LHK[at, head], k_LGK[other, group]
                rope, grown = config.rope_layers or (1,), config.attention_temperature
                if config.position == "rotary" and rope[layer % len(rope)]:
                    query, key = rotated(query, at, config, local), rotated(key, other, config, local)
                    if config.qk_norm == "rotated":
                        query, key = (normalized(one, dict(scale=1), config) for one in (query, key))
                elif grown is not None:
                    query = query * (1 + grown.scale * math.log(1 + (at + 1) // grown.step))
                score = scale * float(query @ key)
                if config.position == "relative":
                    score += tables["relative_positions"][bucket(other - at, config), head]
                cap = config.attention_softcap
                scores[other] = score if cap is None else cap * math.tanh(score / cap)
            weights = np.exp(scores)
            sink = np.exp(params["sinks"][head]) if config.attention_sinks else 0
            out_LHK[at, head] = weights / (weights.sum() + sink) @ v_LGK[:, group]
    return np.einsum("lhk,hkd->ld", out_LHK, params["output"]["kernel"]) + params["output"].get("bias", 0)


def gelu(x: np.ndarray, *, exact: bool) -> np.ndarray:
    inner = (
        np.vectorize(math.erf)(x / math.sqrt(2)) if exact else np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    )
    return 0.5 * x * (1 + inner)


def through_mlp(x_LD: np.ndarray, params: Any, config: TransformerConfig) -> np.ndarray:
    up_LF = x_LD @ params["up"]["kernel"] + params["up"].get("bias", 0)
    match config.activation:
        case "swiglu" | "geglu" | "geglu_exact":
            gate_LF = x_LD @ params["gate"]["kernel"] + params["gate"].get("bias", 0)
            silu, exact = config.activation == "swiglu", config.activation == "geglu_exact"
            hidden_LF = (gate_LF / (1 + np.exp(-gate_LF)) if silu else gelu(gate_LF, exact=exact)) * up_LF
        case "relu":
            hidden_LF = np.maximum(up_LF, 0)
        case activation:
            hidden_LF = gelu(up_LF, exact=activation == "gelu_exact")
    return hidden_LF @ params["down"]["kernel"] + params["down"].get("bias", 0)


def through_experts(x_LD: np.ndarray, params: Any, config: TransformerConfig) -> np.ndarray:
    """The best expert of each token, whose sigmoid multiplies what goes in."""
    scores_LE = 1 / (1 + np.exp(-x_LD @ params["router"]["kernel"]))
    rows = [jax.tree.map(lambda leaf, e=e: leaf[e], {**params, "router": None}) for e in scores_LE.argmax(-1)]
    weighted = zip(x_LD * scores_LE.max(-1, keepdims=True), rows, strict=True)
    return np.stack([through_mlp(x_D[None], row, config)[0] for x_D, row in weighted])


def logits_of(params: Any, config: TransformerConfig, tokens_L: np.ndarray) -> np.ndarray:
    x_LD = params["embedding"][tokens_L] * (config.embedding_scale or 1)
    if config.position == "learned":
        x_LD = x_LD + params["positions"][config.position_offset : config.position_offset + len(tokens_L)]
    if config.token_types:
        x_LD = x_LD + params["token_types"][0]
    if config.embedding_norm is True:
        x_LD = normalized(x_LD, params["embedding_norm"], config)
    if "embedding_projection" in params:
        projection = params["embedding_projection"]
        x_LD = x_LD @ projection["kernel"] + projection["bias"]
    for layer in range(config.num_layers):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])

        def norm(x_LD: np.ndarray, name: str, block: Any = block) -> np.ndarray:
            return normalized(x_LD, block[f"{name}_norm"], config)

        def attend(x_LD: np.ndarray, block: Any = block, layer: int = layer) -> np.ndarray:
            return attended(x_LD, block["attention"], params, config, layer)

        def mlp(x_LD: np.ndarray, block: Any = block) -> np.ndarray:
            if config.experts is None:
                return through_mlp(x_LD, block["mlp"], config)
            return through_experts(x_LD, block["mlp"], config) + through_mlp(x_LD, block["shared"], config)

        scale = config.residual_scale or 1

        match config.block:
            case "pre":
                inner_LD = norm(x_LD, "attention")
                x_LD = inner_LD if config.embedding_norm == "first_layer" and layer == 0 else x_LD
                x_LD = x_LD + scale * attend(inner_LD)
                x_LD = x_LD + scale * mlp(norm(x_LD, "mlp"))
            case "post":
                x_LD = norm(x_LD + attend(x_LD), "attention")
                x_LD = norm(x_LD + mlp(x_LD), "mlp")
            case "output":
                x_LD = x_LD + scale * norm(attend(x_LD), "attention_output")
                x_LD = x_LD + scale * norm(mlp(x_LD), "mlp_output")
            case "sandwich":
                x_LD = x_LD + norm(attend(norm(x_LD, "attention")), "attention_output")
                x_LD = x_LD + norm(mlp(norm(x_LD, "mlp")), "mlp_output")
            case "parallel":
                x_LD = x_LD + attend(norm(x_LD, "attention")) + mlp(norm(x_LD, "mlp"))
            case "parallel_one_norm":
                x_LD = x_LD + attend(norm(x_LD, "attention")) + mlp(norm(x_LD, "attention"))
    if config.block != "post":
        x_LD = normalized(x_LD, params["output_norm"], config)
    kernel_DV = params["embedding"].T if config.tie_embeddings else params["output"]
    logits_LV = x_LD @ kernel_DV * (config.logits_scale or 1) + params.get("output_bias", 0)
    cap = config.logits_softcap
    return logits_LV if cap is None else cap * np.tanh(logits_LV / cap)


def computed(row: str) -> tuple[np.ndarray, Any, TransformerConfig]:
    config = TransformerConfig(**{**SIZES, "max_sequence_length": 64, **ROWS[row]})  # pyright: ignore
    model = transformer(config)
    params = scrambled(jax.eval_shape(model.init, jax.random.key(0))[0])
    logits, _ = jax.jit(lambda params: model.apply(params, {}, TOKENS, key=None, train=False))(params)
    return np.asarray(logits["logits"] if config.experts else logits), params, config


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in PLAIN else pytest.mark.long) for row in ROWS])
def test_follows_the_formula(row: str) -> None:
    logits, params, config = computed(row)
    exact = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    wanted = np.stack([logits_of(exact, config, tokens_L) for tokens_L in TOKENS])
    # float32 against float64: 3 layers of sums over at most 12 numbers.
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * np.ptp(wanted))


def test_frequencies_of_llama_3_1_are_those_of_its_report() -> None:
    """Meta's settings: wavelengths up to 2,048 positions stay, from 8,192 on they are 8 times as long."""
    scaling = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
    plain, slowed = (np.asarray(rotary_frequencies(128, 5e5, one)) for one in (None, scaling))
    ratios, wavelengths = plain / slowed, 2 * math.pi / plain
    np.testing.assert_allclose(ratios[wavelengths <= 2048], 1, rtol=1e-6)
    np.testing.assert_allclose(ratios[wavelengths >= 8192], 8, rtol=1e-6)
    # Between them 1 / ((1 - s) / 8 + s) with s = (8192 / wavelength - 1) / 3.
    np.testing.assert_allclose(ratios[28:36], [1, 1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573, 8], rtol=1e-4)


def test_chunks_and_temperatures_count_from_the_start_of_each_packed_text() -> None:
    _, params, config = computed("llama4")
    model, tokens = transformer(config), TOKENS[:1]
    places = np.array([[*range(7), *range(LENGTH - 7)]])
    packed = {"tokens": tokens, "segments": np.array([[1] * 7 + [2] * (LENGTH - 7)])}
    found, with_positions, *apart = (
        model.apply(params, {}, inputs, key=None, train=False)[0]["logits"]
        for inputs in (packed, packed | {"positions": places}, tokens[:, :7], tokens[:, 7:])
    )
    np.testing.assert_array_equal(found, with_positions)
    # float32, the same sums over keys in another order.
    np.testing.assert_allclose(found, np.concatenate(apart, 1), rtol=0, atol=1e-5 * np.ptp(found))


def test_factors_are_not_rounded_to_the_dtype_of_what_they_multiply() -> None:
    """In bf16 0.22 would be 0.2197, of every layer."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=2**14), jnp.bfloat16)
    x32, found = x.astype(jnp.float32), scaled(x, 0.22).astype(jnp.float32)
    np.testing.assert_allclose(found @ x32 / (x32 @ x32), 0.22, rtol=3e-4)


def test_a_masked_head_has_no_second_bias() -> None:
    with pytest.raises(ConfigError, match=r"output_bias .* head\.bias"):
        TransformerConfig(output_bias=True, head={"kind": "masked_language_model"})
