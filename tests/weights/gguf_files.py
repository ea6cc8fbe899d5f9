"""Writes small GGUF files, right and wrong, byte by byte: the reader under test has no writer."""

import math
import re
import struct

import numpy as np

NUMBERS = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "u64": (10, "<Q")}


def string(text):
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(given):
    """The type and the bytes of a value; ("f32", 0.5) says which number it is."""
    if isinstance(given, bool):
        return struct.pack("<IB", 7, given)
    if isinstance(given, str):
        return struct.pack("<I", 8) + string(given)
    if isinstance(given, tuple):
        number, form = NUMBERS[given[0]]
        return struct.pack("<I", number) + struct.pack(form, given[1])
    if isinstance(given, list):
        parts = [value(one) for one in given]
        return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(given)) + b"".join(one[4:] for one in parts)
    return value(("u32", given) if isinstance(given, int) else ("f32", given))


def gguf_bytes(metadata, tensors, *, version=3, entries=None, counts=None):
    """The bytes of a file.

    Args:
        metadata: Key -> value.
        tensors: Name -> array: float32, float16, or (number of a ggml type, shape, bytes).
        entries: In place of the table of tensors: (name, shape, type, offset) each.
        counts: In place of the numbers of tensors and of keys.
    """
    table, content = [], b""
    for name, array in tensors.items():
        if isinstance(array, tuple):
            kind, shape, data = array
        else:
            kind = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}[array.dtype]
            shape, data = array.shape, array.tobytes()
        content += bytes(-len(content) % 32)
        table.append((name, shape, kind, len(content)))
        content += data
    table = table if entries is None else entries
    num_tensors, num_keys = counts or (len(table), len(metadata))
    out = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    for key, given in metadata.items():
        out += string(key) + value(given)
    for name, shape, kind, offset in table:
        out += string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32) + content


def q8_0(array):
    """A tensor as Q8_0 blocks and the float32 values that these blocks stand for."""
    groups = array.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    q = np.round(groups / scales.astype(np.float32)).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), q.view(np.uint8)], axis=1)
    assert blocks.size == math.prod(array.shape) // 32 * 34
    return (8, array.shape, blocks.tobytes()), (q * scales.astype(np.float32)).reshape(array.shape)


# Model type -> GGUF architecture.
ARCHITECTURES = {
    **{"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt2": "gpt2"},
}
KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length", "n_embd": "embedding_length",
    "n_layer": "block_count", "n_head": "attention.head_count", "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}  # fmt: skip
FLOATS = {"rms_norm_eps", "layer_norm_epsilon", "attn_logit_softcapping", "final_logit_softcapping"}


def metadata_of(config):
    """What a converter to GGUF writes for a config.json of transformers 5."""
    arch = ARCHITECTURES[config["model_type"]]
    found = {"general.architecture": arch, "general.name": "tiny"}
    for theirs, ours in KEYS.items():
        if config.get(theirs) is not None:
            found[f"{arch}.{ours}"] = ("f32" if theirs in FLOATS else "u32", config[theirs])
    if arch == "gpt2":
        found["gpt2.feed_forward_length"] = config["n_inner"] or 4 * config["n_embd"]
        return found
    if config.get("head_dim") is not None:
        found[f"{arch}.attention.value_length"] = config["head_dim"]
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        found[f"{arch}.rope.freq_base_swa"] = ("f32", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    found[f"{arch}.rope.freq_base"] = ("f32", rope["rope_theta"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found[f"{arch}.rope.dimension_count"] = round(width * rope.get("partial_rotary_factor", 1))
    if rope["rope_type"] in ("linear", "yarn"):
        found[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        found[f"{arch}.rope.scaling.factor"] = ("f32", rope["factor"])
    if rope["rope_type"] == "yarn":
        found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found[f"{arch}.rope.scaling.yarn_beta_fast"] = ("f32", rope["beta_fast"])
        found[f"{arch}.rope.scaling.yarn_beta_slow"] = ("f32", rope["beta_slow"])
    if rope["rope_type"] == "longrope":
        ratio = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(ratio) / math.log(rope["original_max_position_embeddings"]))
        found[f"{arch}.rope.scaling.attn_factor"] = ("f32", factor)
    return found


# Part of a published name -> part of the GGUF name; the first that fits.
WORDS = (
    ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
    ("model.layers.", "blk."), ("transformer.wte", "token_embd"), ("transformer.wpe", "position_embd"),
    ("transformer.ln_f", "output_norm"), ("transformer.h.", "blk."), ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"), ("self_attn.qkv_proj", "attn_qkv"), ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"), ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"), ("mlp.gate_up_proj", "ffn_up"), ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.", "ffn_gate_inp."), ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.w3", "ffn_up_exps"), ("block_sparse_moe.experts.w2", "ffn_down_exps"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"), ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"), ("ln_1", "attn_norm"), ("ln_2", "ffn_norm"),
    ("attn.c_attn", "attn_qkv"), ("attn.c_proj", "attn_output"), ("mlp.c_fc", "ffn_up"), ("mlp.c_proj", "ffn_down"),
)  # fmt: skip


def tensors_of(config, tensors):
    """The tensors of a published file as a converter to GGUF writes them."""
    kind, found, experts = config["model_type"], {}, {}
    for name, array in tensors.items():
        gemma = kind.startswith("gemma")
        theirs = name.replace("post_attention_layernorm", "post_attention_norm" if gemma else "ffn_norm")
        number = re.search(r"experts\.(\d+)\.", theirs)
        theirs = re.sub(r"experts\.\d+\.", "experts.", theirs)
        for old, new in WORDS:
            theirs = theirs.replace(old, new)
        if ARCHITECTURES[kind] == "llama" and re.search(r"attn_[qk]\.", theirs):
            heads = config["num_attention_heads" if "attn_q" in theirs else "num_key_value_heads"]
            # Neighbouring pairs in place of the two halves.
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if gemma and theirs.endswith("norm.weight"):
            array = array + np.float32(1)
        if kind == "gpt2" and theirs.startswith("blk.") and array.ndim == 2:
            array = array.T
        array = np.ascontiguousarray(array)
        if number:
            experts.setdefault(theirs, []).append((int(number[1]), array))
        else:
            found[theirs] = array
    stacked = {
        name: np.stack([array for _, array in sorted(rows, key=lambda row: row[0])]) for name, rows in experts.items()
    }
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(rope, config["head_dim"]).astype(np.float32)
    if rope.get("rope_type") == "longrope":
        found["rope_factors_short.weight"] = np.float32(rope["short_factor"])
        found["rope_factors_long.weight"] = np.float32(rope["long_factor"])
    return found | stacked


def llama3_divisors(rope, width):
    """What Llama 3 divides its rotary frequencies by, float [width / 2]."""
    found, original = [], rope["original_max_position_embeddings"]
    for at in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (at / width)
        if wavelength < original / rope["high_freq_factor"]:
            found.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            found.append(rope["factor"])
        else:
            share = original / wavelength - rope["low_freq_factor"]
            share /= rope["high_freq_factor"] - rope["low_freq_factor"]
            found.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(found)
