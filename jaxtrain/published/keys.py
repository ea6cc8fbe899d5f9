"""How a family declares the keys of its config.json, and how they are read and written. No jax here.

A family's `KEYS` holds one declaration for every key that the family's published files can have:

    Mapped("hidden_size", to="embed_dim", default=4096)      becomes the key embed_dim of our model group
    Mapped("hidden_act", to="activation", default="silu", values={"silu": "swiglu"})     other values are refused
    Own("rope_scaling", default=None)                         the family's own code maps it
    Fixed("pretraining_tp", 1, reason="...")                  known, and supported with these values only
    Ignored("initializer_range", reason="...")                known, and without any effect on the model's outputs

`default` is the FAMILY's default (of the class in transformers that reads the file), because published files leave
defaults out. A function as a default gets the file's values read so far and answers for a key that is absent or null:

    Mapped("num_key_value_heads", to="num_kv_heads", default=lambda file: file["num_attention_heads"])

A key that is not declared, neither by the family nor in EVERYWHERE, is an error that names the key and its value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.errors import ConfigError

Default = object | Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Mapped:
    """A key of config.json that becomes a key of our model group.

    Attributes:
        name: Key of config.json.
        to: Key of our model group.
        default: The family's value where the file leaves the key out (see the module).
        values: Their values -> ours; null: the value is taken as it is. Several of theirs may stand for one of ours;
            the first of them is written.
        other_names: Names that some files use for the same key.
    """

    name: str
    to: str = field(kw_only=True)
    default: Default = field(kw_only=True)
    values: Mapping[Any, Any] | None = field(default=None, kw_only=True)
    other_names: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Own:
    """A key of config.json that the family's own code reads and writes."""

    name: str
    default: Default = field(kw_only=True)
    other_names: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Fixed:
    """A key of config.json that is supported with some values only; the first is the family's default.

    Attributes:
        name: Key of config.json.
        values: The values that change nothing in what we compute.
        reason: What another value would ask for, as a clause ("it splits the linear layers into slices").
    """

    name: str
    values: tuple[object, ...]
    reason: str = field(kw_only=True)
    other_names: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Ignored:
    """A key of config.json that has no effect on the outputs of the model.

    Attributes:
        name: Key of config.json.
        reason: What the key is for.
    """

    name: str
    reason: str = field(kw_only=True)
    other_names: tuple[str, ...] = field(default=(), kw_only=True)


Key = Mapped | Own | Fixed | Ignored


def _ignored(reason: str, *names: str) -> tuple[Key, ...]:
    return tuple(Ignored(name, reason=reason) for name in names)


# Keys that transformers writes into the config.json of every family.
EVERYWHERE: tuple[Key, ...] = (
    *_ignored("says how the file came to be", "_name_or_path", "transformers_version", "architectures", "model_type",
              "auto_map", "unsloth_version", "unsloth_fixed", "name_or_path", "_commit_hash"),
    *_ignored("the dtype of the tensors, which each tensor says itself", "torch_dtype", "dtype"),
    *_ignored("a matter of generation or of the tokenizer", "use_cache", "bos_token_id", "eos_token_id",
              "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "decoder_start_token_id",
              "tokenizer_class", "prefix", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
              "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
              "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
              "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id",
              "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
              "task_specific_params", "cache_implementation"),
    *_ignored("names the labels of a head, or its loss", "id2label", "label2id", "num_labels", "problem_type",
              "finetuning_task", "_num_labels"),
    *_ignored("chooses what transformers returns, or how it computes the same", "output_attentions",
              "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate", "torchscript",
              "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "gradient_checkpointing",
              "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_return_dict"),
    *_ignored("only used to make random weights", "initializer_range", "initializer_factor"),
    Fixed("pruned_heads", ({}, None), reason="it removes attention heads from some layers"),
    Fixed("is_decoder", (False, None), reason="it makes a decoder of an encoder"),
    Fixed("is_encoder_decoder", (False, None), reason="it asks for an encoder and a decoder"),
    Fixed("add_cross_attention", (False, None), reason="it adds attention to another sequence"),
    Fixed("cross_attention_hidden_size", (None,), reason="it adds attention to another sequence"),
    Fixed("tie_encoder_decoder", (False, None), reason="it shares the weights of an encoder and a decoder"),
    Fixed("quantization_config", (None,), reason="its tensors are quantized; publish them in float32, float16 or "
          "bfloat16 first"),
)  # fmt: skip


def read_keys(keys: Sequence[Key], config: Mapping[str, Any], *, family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a config.json by the declarations of its family.

    Args:
        keys: The family's declarations; they win over those of EVERYWHERE.
        config: The object in the config.json.
        family: Name of the family, for messages.

    Returns:
        The keys of our model group that are `Mapped`; and the file's values of every declared key, with the family's
        defaults filled in, for the family's own code.

    Raises:
        ConfigError: If the file has a key that is not declared, or a value that is not supported.
    """
    declared = {key.name: key for key in EVERYWHERE} | {key.name: key for key in keys}
    names = {name: key for key in declared.values() for name in (key.name, *key.other_names)}
    for name, value in config.items():
        if name not in names:
            raise ConfigError(
                f"config.json has the key {name} (value {_shown(value)}), which the family {family} does not know; "
                "remove it if it changes nothing in the model"
            )
    theirs: dict[str, Any] = {}
    for key in declared.values():
        if not isinstance(key, Ignored):
            theirs[key.name] = _value(key, config, theirs, family)
    ours = {key.to: _translated(key, theirs[key.name], family) for key in declared.values() if isinstance(key, Mapped)}
    return ours, theirs


def write_keys(keys: Sequence[Key], model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `Mapped` keys of a config.json for a model group, the inverse of `read_keys`.

    Args:
        keys: The family's declarations.
        model: Our model group, every key of it.

    Raises:
        ConfigError: If a key of the model group has a value that the family has no word for.
    """
    written: dict[str, Any] = {}
    for key in keys:
        if isinstance(key, Mapped):
            value = model[key.to]
            if key.values is None:
                written[key.name] = value
                continue
            theirs = [one for one, other in key.values.items() if other == value and type(other) is type(value)]
            if not theirs:
                wanted = ", ".join(_shown(other) for other in dict.fromkeys(key.values.values()))
                raise ConfigError(f"model.{key.to} is {_shown(value)}, but this family knows only {wanted}")
            written[key.name] = theirs[0]
    return written


def _value(key: Mapped | Own | Fixed, config: Mapping[str, Any], theirs: Mapping[str, Any], family: str) -> object:
    given = [name for name in (key.name, *key.other_names) if name in config]
    if isinstance(key, Fixed):
        value = config[given[0]] if given else key.values[0]
        if not any(value == one and type(value) is type(one) for one in key.values):
            raise ConfigError(
                f"config.json has {given[0]}: {_shown(value)}, which the family {family} does not support "
                f"({key.reason}); {_shown(key.values[0])} would work"
            )
        return value
    if callable(key.default):
        value = config[given[0]] if given else None
        return key.default(theirs) if value is None else value
    return config[given[0]] if given else key.default


def _translated(key: Mapped, value: object, family: str) -> object:
    if key.values is None:
        return value
    if not isinstance(value, str | int | float | bool | None) or value not in key.values:
        raise ConfigError(
            f"config.json has {key.name}: {_shown(value)}, which the family {family} does not support; it knows "
            f"{', '.join(_shown(one) for one in key.values)}"
        )
    return key.values[value]


def _shown(value: object) -> str:
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else str(value)
    text = str(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
