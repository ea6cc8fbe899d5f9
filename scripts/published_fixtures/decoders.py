"""Fixtures of the decoders: language models, and one with labels per sequence."""

# pyright: reportMissingImports=false
from typing import Any

import numpy as np
import torch
import transformers as tf
from published_fixtures.fixture import IGNORED, Arrays, Fixture, Unsuitable, generate, near_the_dip, outputs_of, padded

VOCABULARY = 40
NEW_TOKENS = 10
_UP = "model.layers.0.mlp.up_proj.weight"
_NO_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def language_model(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make two full rows, their next tokens as labels, and answers to two prompts."""
    arrays = answers(model, generator, fixture.length, fixture.prompt)
    return arrays | {"labels": np.concatenate([arrays["tokens"][:, 1:], np.full((2, 1), IGNORED)], axis=1)}


def answers(model: Any, generator: np.random.Generator, length: int, prompt_length: int) -> Arrays:
    """Make two full rows and answers to two prompts."""
    tokens = generator.integers(3, VOCABULARY, (2, length))
    prompt = generator.integers(3, VOCABULARY, (2, prompt_length))
    mask = torch.ones(prompt.shape, dtype=torch.long)
    generated = generate(model, torch.from_numpy(prompt), length=NEW_TOKENS, attention_mask=mask)
    return {"tokens": tokens, "prompt": prompt, "generated": generated} | outputs_of(model, {"tokens": tokens})


def long_and_short(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make rows of a language model under the original length, and the same over it."""
    original = fixture.config.rope_parameters["original_max_position_embeddings"]
    short = language_model(fixture, model, generator)
    long = answers(model, generator, original + 8, original + 2)
    if short["tokens"].shape[1] > original or short["generated"].shape[1] > original:
        raise Unsuitable("the short rows are over the original length")
    return short | {f"{name}_long": array for name, array in long.items()}


def labelled(fixture: Fixture, model: Any, generator: np.random.Generator) -> Arrays:
    """Make rows with padding and one label each."""
    arrays = padded(generator, fixture.length, VOCABULARY, 0) | {"labels": generator.integers(0, 3, 2)}
    return arrays | outputs_of(model, arrays)


def old_form(config: dict[str, Any]) -> dict[str, Any]:
    """Write the rotary part and the dtype of a config as transformers 4 did, and as the hub's older files have them."""
    old = {name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")}
    old |= {"torch_dtype": config["dtype"], "transformers_version": "4.46.0"}
    group = dict(config["rope_parameters"])
    if "full_attention" in group:  # a scaling of the global layers only, and in Gemma 3 a base of the local ones
        local, group = group["sliding_attention"], dict(group["full_attention"])
        del old["layer_types"]
        if old.pop("_sliding_window_pattern", None):
            old |= {"rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": 6}
    theta, fraction = group.pop("rope_theta"), group.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        return old | {"rotary_emb_base": theta, "rotary_pct": fraction}
    if fraction is not None and fraction != 1:
        old["partial_rotary_factor"] = fraction
    kind = group.pop("rope_type")
    if kind == "longrope":  # Phi-3's files have the original length beside the scaling
        old["original_max_position_embeddings"] = group.pop("original_max_position_embeddings")
        return old | {"rope_theta": theta, "rope_scaling": {"type": kind, **group}}
    return old | {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"rope_type": kind, **group}}


def by_interval(config: dict[str, Any]) -> dict[str, Any]:
    """Write the config of a SmolLM3 or Llama 4 in its old form, whose kinds of layers follow from the interval."""
    return {name: value for name, value in old_form(config).items() if name not in ("no_rope_layers", "layer_types")}


def old_cohere2(config: dict[str, Any]) -> dict[str, Any]:
    """Write the config of a Cohere 2 as its published files do."""
    old = {name: value for name, value in old_form(config).items() if name != "layer_types"}
    said = ("use_embedding_sharing", "use_gated_activation", "use_parallel_block")
    return old | dict.fromkeys(said, True) | {
        "sliding_window_pattern": 4, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_parallel_embedding": False,
        "use_qk_norm": False, "cache_implementation": "hybrid",
    }  # fmt: skip


def rope(group: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return a change of some of the rotary settings."""
    return {"rope_parameters": {**group, **change}}


def one_kind(layers: int, local: str = "sliding_attention") -> tuple[dict[str, Any], ...]:
    """Return the two changes of a model with windows in some layers: in every one, and in none."""
    return tuple({"layer_types": [kind] * layers} for kind in (local, "full_attention"))


_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "rope_parameters": _ROPE, **_NO_ENDS,
}  # fmt: skip
_STARCODER2 = {name: _LLAMA[name] for name in _LLAMA if name not in ("rms_norm_eps", "tie_word_embeddings")}
_LAYERNORM = {**{name: value for name, value in _LLAMA.items() if name != "rms_norm_eps"}, "layer_norm_eps": 1e-5}
_COHERE = {**_LAYERNORM, "head_dim": 8, "tie_word_embeddings": True, "logit_scale": 0.5}
_GEMMA = {
    **_LLAMA, "hidden_size": 12, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 6, "rms_norm_eps": 1e-6, "intermediate_size": 20,
}  # fmt: skip
# A large embedding, tied and scaled, would repeat the last token for ever.
_SMALL_EMBEDDING = {"embed_tokens.weight": (0.0, 0.3)}
_LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 2.0,
    "beta_slow": 1.0,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [1.5, 3.0, 5.0], "original_max_position_embeddings": 16,
}  # fmt: skip
_DEEPSEEK_YARN = {**_YARN, "mscale": 1.5, "mscale_all_dim": 0.8}
_DEEPSEEK = {
    **_LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "rope_parameters": _DEEPSEEK_YARN,
}  # fmt: skip
_DEEPSEEK_MATTERS = (
    {"routed_scaling_factor": 1.0}, {"num_experts_per_tok": 2}, {"rms_norm_eps": 0.1}, {"rope_parameters": _YARN},
    {"rope_parameters": {**_DEEPSEEK_YARN, "mscale": 0.8}}, {"rope_parameters": {**_DEEPSEEK_YARN, "rope_theta": 10.0}},
    {"rope_parameters": {**_DEEPSEEK_YARN, "mscale_all_dim": 1.5}},
)  # fmt: skip
_PARTIAL = {**_ROPE, "partial_rotary_factor": 0.5}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
# What Phi, OPT and Falcon share.
_PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, **_NO_ENDS,
}  # fmt: skip
_PHI_ROPE = {**_ROPE, "partial_rotary_factor": 0.75}
_FALCON = {**_PLAIN, "num_attention_heads": 4, "ffn_hidden_size": 24, "rope_parameters": _ROPE}
# As near_the_dip, where the bias is that of the norm before the MLP: 16 x -0.14.
_FALCON_WEIGHTS = {
    "word_embeddings.weight": (0.0, 0.3), "ln_mlp.bias": (1.0, 0.1), "dense_h_to_4h.weight": (-0.14, 0.1),
    "dense_4h_to_h.weight": (0.0, 2.0),
}  # fmt: skip
_OLMO3_ROPE = {
    "full_attention": {**_YARN, "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


def causal(
    name: str,
    config: Any,
    settings: dict[str, Any],
    *,
    base: dict[str, Any] = _LLAMA,
    expect: Any = language_model,
    **more: Any,
) -> Fixture:
    """Return the fixture of a language model, whose class is named as its config's is; `settings` go over `base`."""
    family = config.__name__.removesuffix("Config").removesuffix("Text")
    return Fixture(name, getattr(tf, f"{family}ForCausalLM"), config(**{**base, **settings}), expect, **more)


FIXTURES = (
    causal(
        "llama", tf.LlamaConfig, {}, old=old_form,
        gradients=(_UP, "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"),
        matters=({"rms_norm_eps": 0.1}, rope(_ROPE, rope_theta=100.0)),
    ),
    Fixture(
        "gpt2", tf.GPT2LMHeadModel,
        tf.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1,
                      eos_token_id=2, pad_token_id=0), language_model,
        gradients=("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.attn.c_attn.bias"),
        matters=({"activation_function": "gelu"},), special=near_the_dip("mlp.c_fc", "mlp.c_proj"),
    ),
    causal(
        "qwen3", tf.Qwen3Config, dict(head_dim=8, rms_norm_eps=1e-6),
        gradients=("model.layers.0.self_attn.q_norm.weight",),
    ),
    causal(
        "gemma2", tf.Gemma2Config, dict(num_hidden_layers=4, sliding_window=4, attn_logit_softcapping=2.0,
                                        final_logit_softcapping=2.0),
        base=_GEMMA, gain=2.0, gradients=("model.layers.1.pre_feedforward_layernorm.weight",),
        matters=({"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"query_pre_attn_scalar": 8},
                 *one_kind(4), {"sliding_window": 5}, {"hidden_activation": "gelu"}), special=_SMALL_EMBEDDING,
    ),
    causal(
        "gemma3_text", tf.Gemma3TextConfig, dict(num_hidden_layers=7, rope_parameters=_GEMMA3_ROPE, sliding_window=4),
        base=_GEMMA, old=old_form, gradients=("model.layers.5.self_attn.k_norm.weight",),
        matters=(rope(_GEMMA3_ROPE, full_attention=_GEMMA3_ROPE["sliding_attention"]),
                 {"layer_types": ["sliding_attention"] * 7}, {"sliding_window": 5}, {"query_pre_attn_scalar": 8}),
        special=_SMALL_EMBEDDING,
    ),
    causal(
        "llama31", tf.LlamaConfig, dict(head_dim=8, rope_parameters=_LLAMA31), length=40, old=old_form,
        matters=({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, rope(_LLAMA31, factor=4.0),
                 rope(_LLAMA31, high_freq_factor=2.0)),
    ),
    causal(
        "smollm2", tf.LlamaConfig, dict(hidden_size=12, num_attention_heads=3, num_key_value_heads=1,
                                        tie_word_embeddings=True, rope_parameters={**_ROPE, "rope_theta": 100000.0}),
        gradients=("model.embed_tokens.weight",),
    ),
    causal(
        "mistral", tf.MistralConfig, dict(head_dim=4, sliding_window=5),
        matters=({"sliding_window": None}, {"sliding_window": 6}),
    ),
    causal(
        "mixtral", tf.MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2),
        gradients=("model.layers.0.block_sparse_moe.gate.weight",
                   "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        matters=({"num_experts_per_tok": 1},),
    ),
    causal(
        "qwen2", tf.Qwen2Config, dict(tie_word_embeddings=True, rms_norm_eps=1e-6),
        gradients=("model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.v_proj.bias"),
    ),
    causal(
        "qwen2_window", tf.Qwen2Config, dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=5,
                                             max_window_layers=1),
        matters=one_kind(3),
    ),
    causal(
        "qwen2_yarn", tf.Qwen2Config, dict(num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=128,
                                           rope_parameters=_YARN),
        length=40, old=old_form,
        matters=({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, rope(_YARN, attention_factor=1.0),
                 rope(_YARN, original_max_position_embeddings=64), rope(_YARN, beta_fast=32.0)),
    ),
    causal(
        "qwen3_moe", tf.Qwen3MoeConfig, dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                                             decoder_sparse_step=1, norm_topk_prob=True),
        gradients=("model.layers.1.mlp.experts.3.down_proj.weight",),
        matters=({"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
    ),
    causal(
        "phi3", tf.Phi3Config, dict(rope_parameters={**_ROPE, "partial_rotary_factor": 1.0}),
        gradients=("model.layers.0.self_attn.qkv_proj.weight",),
    ),
    causal(
        "phi3_longrope", tf.Phi3Config, dict(num_attention_heads=2, num_key_value_heads=1, rope_parameters=_LONGROPE,
                                             original_max_position_embeddings=16),
        expect=long_and_short, old=old_form,
        matters=(rope(_LONGROPE, short_factor=[1.0] * 3),
                 rope(_LONGROPE, partial_rotary_factor=1.0, short_factor=[1.0, 1.3, 1.7, 2.0],
                      long_factor=[1.5, 3.0, 5.0, 6.0]),
                 rope(_LONGROPE, attention_factor=1.0)),
    ),
    causal(
        "gpt_neox", tf.GPTNeoXConfig, dict(intermediate_size=32, pad_token_id=None, rope_parameters=_PARTIAL),
        base=_PLAIN, old=old_form, gradients=("gpt_neox.layers.0.attention.query_key_value.weight",),
        matters=({"use_parallel_residual": False}, {"hidden_act": "gelu_new"}, rope(_ROPE, partial_rotary_factor=1.0)),
        special=near_the_dip("dense_h_to_4h", "dense_4h_to_h"),
    ),
    causal(
        "starcoder2", tf.Starcoder2Config, dict(sliding_window=5, residual_dropout=0.0, embedding_dropout=0.0),
        base=_STARCODER2, gradients=("model.layers.0.mlp.c_fc.weight",),
        matters=({"sliding_window": None}, {"hidden_act": "gelu"}), special=near_the_dip("mlp.c_fc", "mlp.c_proj"),
    ),
    causal(
        "phi", tf.PhiConfig, dict(intermediate_size=24, num_key_value_heads=1, rope_parameters=_PHI_ROPE), base=_PLAIN,
        old=old_form, gradients=("lm_head.bias", "model.layers.0.self_attn.dense.weight"),
        matters=({"hidden_act": "gelu"}, {"layer_norm_eps": 0.1}, rope(_PHI_ROPE, partial_rotary_factor=0.5),
                 rope(_PHI_ROPE, rope_theta=100.0)), special=near_the_dip("mlp.fc1", "mlp.fc2"),
    ),
    causal(
        "gptj", tf.GPTJConfig, dict(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, n_inner=24,
                                    rotary_dim=6, layer_norm_epsilon=1e-5),
        base=_NO_ENDS, gradients=("lm_head.bias", "transformer.h.1.attn.k_proj.weight"),
        matters=({"activation_function": "gelu"}, {"rotary_dim": 4}, {"layer_norm_epsilon": 0.1}),
        special=near_the_dip("mlp.fc_in", "mlp.fc_out"),
    ),
    causal(
        "opt", tf.OPTConfig, dict(ffn_dim=24), base=_PLAIN,
        gradients=("model.decoder.embed_positions.weight", "model.decoder.layers.0.fc1.bias"),
        matters=({"activation_function": "gelu"}, {"do_layer_norm_before": False}), special=_SMALL_EMBEDDING,
    ),
    causal(
        "falcon", tf.FalconConfig, dict(num_kv_heads=2, new_decoder_architecture=True), base=_FALCON, old=old_form,
        gradients=("transformer.h.0.self_attention.query_key_value.weight",),
        matters=({"activation": "gelu_pytorch_tanh"}, rope(_ROPE, rope_theta=100.0), {"layer_norm_epsilon": 0.1}),
        special=_FALCON_WEIGHTS,
    ),
    causal(
        "falcon_7b", tf.FalconConfig, {}, base=_FALCON,
        gradients=("transformer.h.0.self_attention.query_key_value.weight",),
        special={"word_embeddings.weight": (0.0, 0.3)},
    ),
    causal(
        "olmo2", tf.Olmo2Config, dict(head_dim=8, attention_bias=True), old=old_form,
        gradients=("model.layers.0.self_attn.k_norm.weight", "model.layers.1.post_attention_layernorm.weight",
                   "model.layers.1.self_attn.o_proj.bias"),
        matters=({"attention_bias": False}, {"rms_norm_eps": 0.1}, rope(_ROPE, rope_theta=100.0)),
    ),
    causal(
        "olmo3", tf.Olmo3Config, dict(num_hidden_layers=4, max_position_embeddings=128, head_dim=8, sliding_window=5,
                                      rope_parameters=_OLMO3_ROPE),
        length=40, old=old_form, gradients=("model.layers.3.self_attn.q_norm.weight",),
        matters=(rope(_OLMO3_ROPE, full_attention=_OLMO3_ROPE["sliding_attention"]),
                 rope(_OLMO3_ROPE, sliding_attention=_OLMO3_ROPE["full_attention"]), *one_kind(4),
                 {"sliding_window": 6}),
    ),
    causal(
        "granite", tf.GraniteConfig, dict(tie_word_embeddings=True, head_dim=8, attention_bias=True,
                                          embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7,
                                          logits_scaling=5.0),
        old=old_form,
        gradients=("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
                   "model.layers.1.self_attn.o_proj.bias"),
        matters=({"embedding_multiplier": 1.0}, {"attention_multiplier": 8**-0.5}, {"residual_multiplier": 1.0},
                 {"logits_scaling": 1.0}, {"attention_bias": False}), special=_SMALL_EMBEDDING,
    ),
    causal(
        "smollm3", tf.SmolLM3Config, dict(num_hidden_layers=4, head_dim=8, mlp_bias=True, no_rope_layer_interval=3,
                                          use_sliding_window=True, sliding_window=5),
        old=by_interval, gradients=("model.layers.2.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.bias"),
        matters=({"no_rope_layers": [1] * 4}, {"no_rope_layers": [0] * 4}, {"no_rope_layers": [1, 0, 1, 1]},
                 {"layer_types": ["full_attention"] * 4}, {"sliding_window": 6}, {"mlp_bias": False}),
    ),
    causal(
        "stablelm", tf.StableLmConfig, dict(num_attention_heads=2, rope_parameters=_PARTIAL, use_qkv_bias=True),
        base=_LAYERNORM, old=old_form,
        gradients=("model.layers.0.input_layernorm.bias", "model.norm.bias", "model.layers.1.self_attn.k_proj.bias"),
        matters=(rope(_PARTIAL, partial_rotary_factor=1.0), {"use_parallel_residual": True}, {"use_qkv_bias": False},
                 {"layer_norm_eps": 0.1}, rope(_PARTIAL, rope_theta=100.0)),
    ),
    causal(
        "stablelm_parallel", tf.StableLmConfig, dict(rope_parameters=_PARTIAL, qk_layernorm=True,
                                                     use_parallel_residual=True),
        base=_LAYERNORM, old=old_form,
        gradients=("model.layers.0.self_attn.q_layernorm.norms.3.weight",
                   "model.layers.1.self_attn.k_layernorm.norms.0.weight", "model.layers.0.input_layernorm.weight"),
        matters=({"qk_layernorm": False}, rope(_PARTIAL, partial_rotary_factor=1.0)),
    ),
    causal(
        "cohere", tf.CohereConfig, dict(use_qk_norm=True, attention_bias=True), base=_COHERE, old=old_form,
        gradients=("model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_norm.weight",
                   "model.layers.0.self_attn.o_proj.bias"),
        matters=({"use_qk_norm": False}, {"attention_bias": False}, {"logit_scale": 0.0625}, {"layer_norm_eps": 0.1},
                 rope(_ROPE, rope_theta=100.0)), special=_SMALL_EMBEDDING,
    ),
    causal(
        "cohere2", tf.Cohere2Config, dict(num_hidden_layers=5, sliding_window=4), base=_COHERE, old=old_cohere2,
        gradients=("model.layers.3.self_attn.k_proj.weight", "model.layers.4.self_attn.q_proj.weight"),
        matters=(*one_kind(5), {"sliding_window": 5}, {"logit_scale": 0.0625}, {"layer_norm_eps": 0.1},
                 rope(_ROPE, rope_theta=100.0)), special=_SMALL_EMBEDDING,
    ),
    causal(
        "glm4", tf.Glm4Config, dict(head_dim=8, attention_bias=True, rope_parameters=_PARTIAL), old=old_form,
        gradients=("model.layers.0.mlp.gate_up_proj.weight", "model.layers.1.post_mlp_layernorm.weight",
                   "model.layers.1.self_attn.k_proj.bias"),
        matters=(rope(_PARTIAL, partial_rotary_factor=1.0), {"attention_bias": False}, {"rms_norm_eps": 0.1},
                 rope(_PARTIAL, rope_theta=100.0)),
    ),
    causal(
        "llama4_text", tf.Llama4TextConfig, dict(
            num_hidden_layers=4, head_dim=8, attention_bias=True, num_local_experts=4, no_rope_layer_interval=3,
            attention_chunk_size=5, floor_scale=4, attn_scale=0.7,
            rope_parameters={**_LLAMA31, "factor": 16.0, "high_freq_factor": 1.0},
        ),
        old=by_interval,
        gradients=("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.bias",
                   "model.layers.1.feed_forward.router.weight", "model.layers.3.feed_forward.experts.gate_up_proj",
                   "model.layers.2.feed_forward.shared_expert.down_proj.weight"),
        matters=({"attention_chunk_size": 6}, *one_kind(4, "chunked_attention"), {"no_rope_layers": [1] * 4},
                 {"no_rope_layers": [1, 0, 1, 1]}, {"attn_temperature_tuning": False}, {"attn_scale": 0.5},
                 {"floor_scale": 5}, {"use_qk_norm": False}, {"rms_norm_eps": 0.1}, {"attention_bias": False},
                 rope(_LLAMA31, factor=16.0), rope(_LLAMA31, rope_theta=100.0, factor=16.0, high_freq_factor=1.0)),
    ),
    Fixture(
        "llama_sequence", tf.LlamaForSequenceClassification,
        tf.LlamaConfig(**_LLAMA, num_labels=3), labelled,
        gradients=("score.weight", _UP),
    ),
    causal(
        "gpt_oss", tf.GptOssConfig, dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
                                         rope_parameters={**_YARN, "truncate": False}),
        gradients=("model.layers.0.self_attn.sinks", "model.layers.1.mlp.experts.gate_up_proj_bias"),
        matters=({"num_experts_per_tok": 1}, {"sliding_window": 5}, {"layer_types": ["sliding_attention"] * 2}),
    ),
    Fixture(
        "deepseek_v3", tf.DeepseekV3ForCausalLM,
        tf.DeepseekV3Config(**_DEEPSEEK, q_lora_rank=7, n_group=4, topk_group=2, num_mtp_layers=0),
        language_model, old=old_form,
        gradients=("model.layers.0.self_attn.q_a_layernorm.weight", "model.layers.0.mlp.up_proj.weight",
                   "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "model.layers.2.mlp.gate.weight",
                   "model.layers.2.mlp.shared_experts.down_proj.weight"),
        matters=(*_DEEPSEEK_MATTERS, {"topk_group": 4}, {"norm_topk_prob": False}, {"rope_interleave": False},
                 {"n_group": 2, "topk_group": 1}),
    ),
    Fixture(
        "deepseek_v2", tf.DeepseekV2ForCausalLM, tf.DeepseekV2Config(**_DEEPSEEK, q_lora_rank=None), language_model,
        gradients=("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.kv_b_proj.weight",
                   "model.layers.2.mlp.experts.3.down_proj.weight"),
        matters=_DEEPSEEK_MATTERS, old=old_form,
    ),
)  # fmt: skip
