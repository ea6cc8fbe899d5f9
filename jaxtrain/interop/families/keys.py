"""How a family declares the keys of its config.json. No jax here.

`Family.keys` holds a declaration for every key that the family's published files can have:

    mapped("hidden_size", "embed_dim", 4096)                         becomes the key embed_dim of our model group
    mapped("hidden_act", "activation", "silu", {"silu": "swiglu"})   other values are refused
    own("max_window_layers", 28)                                     the family's own `read` and `write` know it
    fixed("pretraining_tp", 1)                                       known, and supported with these values only
    *ignored("initializer_range")                                    known, without effect on the model's outputs

Defaults are the FAMILY's (of the class in transformers that reads the file), because published files leave defaults
out. A function as a default gets the file's values read so far, and answers for a key that is absent or null.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """A key of config.json; made by `mapped`, `own`, `fixed` and `ignored`.

    Attributes:
        name: The key.
        default: The family's value where the file leaves the key out (see the module).
        to: Key of our model group; None: none.
        values: Their values -> ours; None: as they are. Of several of theirs for one of ours the first is written.
        allowed: The values that are supported; empty: all.
        others: Names that some files use for the same key.
        is_read: False: it has no effect.
        write_default: Whether the default is written too.
    """

    name: str
    default: Any = None
    to: str | None = None
    values: Mapping[Any, Any] | None = None
    allowed: tuple[Any, ...] = ()
    others: tuple[str, ...] = ()
    is_read: bool = True
    write_default: bool = True

    def value_in(self, file: Config) -> Any:
        """Returns the default; `file` is what was read before."""
        return self.default(file) if callable(self.default) else self.default


def mapped(name: str, to: str, default: Any, values: Config | None = None, *, write_default: bool = True) -> Key:
    """Returns a key that becomes the key `to` of our model group."""
    return Key(name, default, to, values, write_default=write_default)


def own(name: str, default: Any = None, *others: str) -> Key:
    """Returns a key that the family's own code reads and writes; `others` are further names of it."""
    return Key(name, default, others=others)


def fixed(name: str, *values: Any) -> Key:
    """Returns a key that is supported with some values only; the first is the default."""
    return Key(name, values[0], allowed=values)


def ignored(*names: str) -> tuple[Key, ...]:
    """Returns keys that change no output."""
    return tuple(Key(name, is_read=False) for name in names)


# Keys that transformers writes into the config.json of every family.
EVERYWHERE = (
    *ignored("_name_or_path", "transformers_version", "architectures", "model_type", "auto_map", "unsloth_version",
             "unsloth_fixed", "name_or_path", "_commit_hash", "torch_dtype", "dtype"),
    # Of generation, of the tokenizer, of labels.
    *ignored("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
             "mask_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix", "max_length",
             "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
             "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
             "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
             "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
             "suppress_tokens", "begin_suppress_tokens", "task_specific_params", "cache_implementation", "id2label",
             "label2id", "num_labels", "problem_type", "finetuning_task", "_num_labels"),
    # What transformers returns, or how it computes the same.
    *ignored("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate",
             "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "gradient_checkpointing",
             "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_return_dict",
             "initializer_range", "initializer_factor"),
    fixed("pruned_heads", {}, None),
    fixed("is_decoder", False, None),
    fixed("is_encoder_decoder", False, None),
    fixed("add_cross_attention", False, None),
    fixed("cross_attention_hidden_size", None),
    fixed("tie_encoder_decoder", False, None),
    fixed("quantization_config", None),
)  # fmt: skip


# What the families after Llama share.
SILU = {"silu": "swiglu", "swish": "swiglu"}
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
GELUS = {name: "gelu" for name in GELU_TANH} | {"gelu": "gelu_exact", "relu": "relu"}


def split_width(file: Config) -> int:
    """The default of `head_dim` in most families."""
    return int(file["hidden_size"]) // int(file["num_attention_heads"])


def decoder_keys(
    *sizes: Any, norm_epsilon: float, tied: bool, mlp_key: str = "intermediate_size", write_head_dim: bool = True
) -> tuple[Key, ...]:
    """Returns the keys that decoders share, each with the family's default.

    Args:
        sizes: Defaults of vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
            num_key_value_heads, head_dim and max_position_embeddings; functions of the values read before for some.
        norm_epsilon, tied: Defaults of rms_norm_eps and tie_word_embeddings.
        mlp_key: The key of the MLP's width.
        write_head_dim: False: transformers divides the width by the heads, and knows no key for the usual head_dim.
    """
    vocabulary, width, mlp, layers, heads, kv_heads, head_dim, length = sizes
    return (
        mapped("vocab_size", "vocab_size", vocabulary),
        mapped("hidden_size", "embed_dim", width),
        mapped(mlp_key, "mlp_dim", mlp),
        mapped("num_hidden_layers", "num_layers", layers),
        mapped("num_attention_heads", "num_heads", heads),
        mapped("num_key_value_heads", "num_kv_heads", kv_heads),
        mapped("head_dim", "head_dim", head_dim, write_default=write_head_dim),
        mapped("max_position_embeddings", "max_sequence_length", length),
        mapped("rms_norm_eps", "norm_epsilon", norm_epsilon),
        mapped("tie_word_embeddings", "tie_embeddings", tied),
        mapped("hidden_act", "activation", "silu", SILU),
        fixed("attention_dropout", 0.0, 0),
    )


def rope_keys(theta: float, *others: str) -> tuple[Key, ...]:
    """Returns the rotary keys; `theta` is the default of rope_theta, and `others` are further names of that key."""
    return (own("rope_theta", theta, *others), own("rope_scaling"), own("rope_parameters"))


HEAD_KEYS = (own("architectures"), own("id2label"), own("num_labels", None, "_num_labels"), own("problem_type"))
