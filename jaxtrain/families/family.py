"""What a published family is: the keys of its config.json, its name table, and what translates both. No jax here.

`Family.keys` holds a declaration for every key that the family's published files can have:

    mapped("hidden_size", "embed_dim", 4096)                         becomes the key embed_dim of our model group
    mapped("hidden_act", "activation", "silu", {"silu": "swiglu"})   other values are refused
    own("max_window_layers", 28)                                     the family's own `read` and `write` know it
    fixed("pretraining_tp", 1)                                       known, and supported with these values only
    *ignored("initializer_range")                                    known, without effect on the model's outputs

Defaults are the FAMILY's (of the class in transformers that reads the file), because published files leave defaults
out. A function as a default gets the file's values read so far, and answers for a key that is absent or null.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.formats.rope import read_rope, write_rope
from jaxtrain.formats.rows import Row

Config = Mapping[str, Any]
Values = Mapping[Any, Any]


@dataclass(frozen=True)
class Key:
    """A key of config.json; made by `mapped`, `own`, `fixed` and `ignored`.

    Attributes:
        name: The key.
        default: The family's value where the file leaves the key out (see the module).
        to: Key of our model group; None: none.
        values: Their values -> ours; None: as they are. Of several of theirs for one of ours the first is written.
        allowed: The values that are supported; empty: all. A function gets the file's values read so far.
        others: Names that some files use for the same key.
        is_read: False: it has no effect.
        write_default: Whether the default is written too.
    """

    name: str
    default: Any = None
    to: str | None = None
    values: Values | None = None
    allowed: tuple[Any, ...] | Callable[[Config], tuple[Any, ...]] = ()
    others: tuple[str, ...] = ()
    is_read: bool = True
    write_default: bool = True

    def value_in(self, file: Config) -> Any:
        """Returns the default; `file` is what was read before."""
        return self.default(file) if callable(self.default) else self.default


def mapped(name: str, to: str, default: Any, values: Values | None = None, *, write_default: bool = True) -> Key:
    """Returns a key that becomes the key `to` of our model group."""
    return Key(name, default, to, values, write_default=write_default)


def own(name: str, default: Any = None, *others: str) -> Key:
    """Returns a key that the family's own code reads and writes; `others` are further names of it."""
    return Key(name, default, others=others)


def fixed(name: str, *values: Any) -> Key:
    """Returns a key that is supported with some values only; the first is the default."""
    return Key(name, values[0], allowed=values)


def gelu_key(name: str, default: str, tanh: str = "gelu_pytorch_tanh") -> Key:
    """Returns the key of the activation of an MLP without a gate; `tanh` is what is written for the approximation."""
    return mapped(name, "activation", default, {tanh: "gelu"} | _GELUS)


def checked(name: str, default: Any, allowed: Callable[[Config], tuple[Any, ...]]) -> Key:
    """Returns an `own` key whose values follow from those read before it."""
    return Key(name, default, allowed=allowed)


def ignored(*names: str) -> tuple[Key, ...]:
    """Returns keys that change no output."""
    return tuple(Key(name, is_read=False) for name in names)


# Keys that transformers writes into the config.json of every family.
_EVERYWHERE = (
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
    *(fixed(name, False, None) for name in
      ("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder")),
    fixed("cross_attention_hidden_size", None),
    fixed("quantization_config", None),
)  # fmt: skip
# What the families after Llama share.
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GELUS = {name: "gelu" for name in GELU_TANH} | {"gelu": "gelu_exact", "relu": "relu"}
HEAD_KEYS = (own("architectures"), own("id2label"), own("num_labels", None, "_num_labels"), own("problem_type"))
# Our key -> theirs.
_SIZES = {
    "vocab_size": "vocab_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "max_sequence_length": "max_position_embeddings", "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "sliding_window": "sliding_window",
}  # fmt: skip
_LLAMA_NAMES: Mapping[str, str] = {}


def split_width(file: Config) -> int:
    """The default of `head_dim` in most families."""
    return int(file["hidden_size"]) // int(file["num_attention_heads"])


_SILU = mapped("hidden_act", "activation", "silu", {"silu": "swiglu", "swish": "swiglu"})


def size_keys(defaults: Config, names: Mapping[str, str] = _LLAMA_NAMES) -> tuple[Key, ...]:
    """Returns the keys of the sizes among `defaults`.

    Args:
        defaults: The family's defaults, by our names.
        names: Our key -> theirs, where it is not Llama's.
    """
    return tuple(
        mapped(names.get(ours, name), ours, defaults[ours]) for ours, name in _SIZES.items() if ours in defaults
    )


def decoder_keys(
    defaults: Config,
    *,
    activation: Key = _SILU,
    names: Mapping[str, str] = _LLAMA_NAMES,
    write_head_dim: bool = True,
) -> tuple[Key, ...]:
    """Returns the keys that decoders share.

    Args:
        defaults: The family's defaults, by our names; as many heads of keys as of queries, `split_width`, an epsilon of
            1e-6 and an output layer of its own are there unless said otherwise.
        activation: The key of the activation.
        names: Our key -> theirs, where it is not Llama's.
        write_head_dim: False: transformers divides the width by the heads, and knows no key for the usual head_dim.
    """
    usual = dict(num_kv_heads=lambda file: int(file["num_attention_heads"]), head_dim=split_width)
    usual |= dict(norm_epsilon=1e-6, tie_embeddings=False)
    keys = size_keys(usual | {**defaults}, names)
    keys = (replace(key, write_default=write_head_dim or key.to != "head_dim") for key in keys)
    return (*keys, activation, fixed("attention_dropout", 0.0, 0))


def rope_keys(theta: float, *others: str, fraction: float | None = None) -> tuple[Key, ...]:
    """Returns the rotary keys.

    Args:
        theta: The default of rope_theta.
        others: Further names of that key.
        fraction: The default of partial_rotary_factor; None: the family has no such key.
    """
    part = [] if fraction is None else [mapped("partial_rotary_factor", "rotary_fraction", fraction)]
    return (own("rope_theta", theta, *others), own("rope_scaling"), own("rope_parameters"), *part)


def size(common: Config, layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    """Returns the keys of our model group of one published size; `mlp_dim` is 4 x `width` unless it is given.

    A config whose file has an mlp_dim of its own would keep that one if the size named none.
    """
    return {"mlp_dim": 4 * width, **common, "num_layers": layers, "embed_dim": width, "num_heads": heads, **more}


def _nothing(*_: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published family.

    Attributes:
        name: The `model_type` of its config.json.
        architecture: The class of transformers that is written.
        keys: Declarations of every key of its config.json.
        tensors: Our model group, every key of it, with num_kv_heads, head_dim and mlp_dim filled in -> the name table.
        fixed: Keys of our model group that all models of the family have; those whose default of ours is not what the
            family means must be there.
        sizes: Published sizes: name -> keys of our model group.
        rotary: Whether it has the rotary keys, `rope_keys(theta)` among its keys.
        read: (mapped keys, the file's values of all declared keys) -> further keys of our model group.
        text: The family of the text part, which alone is read, of models that see images too.
        write: Our model group -> further keys of config.json. What it cannot say it need not check: the caller reads
            the result back and names the key that differs.
    """

    name: str
    architecture: str
    keys: tuple[Key, ...]
    tensors: Callable[[Config], tuple[Row, ...]]
    fixed: Config = field(default_factory=dict)
    sizes: Mapping[str, Config] = field(default_factory=dict)
    rotary: bool = False
    read: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[Config], dict[str, Any]] = _nothing
    text: "Family | None" = None

    @property
    def known(self) -> set[str]:
        """The keys that its config.json may have."""
        return {name for key in (*_EVERYWHERE, *self.keys) for name in (key.name, *key.others)}

    def from_published(self, config: Config) -> dict[str, Any]:
        """Returns the keys of our model group, `kind` included, for the object in a config.json.

        Raises:
            ConfigError: The file has a key that is not declared, or a value that is not supported.
        """
        if self.text is not None:
            return self.text.from_published(config["text_config"])
        declared, known = {key.name: key for key in (*_EVERYWHERE, *self.keys)}, self.known
        for unknown in (name for name in config if name not in known):
            raise ConfigError(
                f"config.json has the key {unknown} (value {_shown(config[unknown])}), which the family {self.name} "
                "does not know; remove it if it changes nothing in the model"
            )
        ours: dict[str, Any] = {}
        file: dict[str, Any] = {}
        for key in (key for key in declared.values() if key.is_read):
            given = [config[name] for name in (key.name, *key.others) if name in config][:1]
            computed = given == [None] and callable(key.default)
            file[key.name] = value = key.value_in(file) if not given or computed else given[0]
            allowed = key.allowed(file) if callable(key.allowed) else key.allowed or tuple(key.values or ())
            if allowed and not any(value == one and type(value) is type(one) for one in allowed):
                raise ConfigError(
                    f"config.json has {key.name}: {_shown(value)}, which the family {self.name} does not support; it "
                    f"knows {', '.join(map(_shown, allowed))}"
                )
            if key.to is not None:
                ours[key.to] = value if key.values is None else key.values[value]
        rope = read_rope(file) if self.rotary else {}
        return {"kind": "transformer", **self.fixed, **ours, **rope, **self.read(ours, file)}

    def to_published(self, model: Config) -> dict[str, Any]:
        """Returns the config.json of a model group, every key of it.

        Raises:
            ConfigError: A key of the model group has a value that the family has no word for.
        """
        written: dict[str, Any] = {}
        for key in (key for key in self.keys if key.to is not None):
            value = model[str(key.to)]
            if key.values is not None:
                theirs = [one for one, ours in key.values.items() if ours == value and type(ours) is type(value)]
                if not theirs:
                    wanted = ", ".join(map(_shown, dict.fromkeys(key.values.values())))
                    raise ConfigError(f"model.{key.to} is {_shown(value)}, but this family knows only {wanted}")
                value = theirs[0]
            if key.write_default or value != key.value_in(written):
                written[key.name] = value
        rope = write_rope(model) if self.rotary else {}
        return {"architectures": [self.architecture], "model_type": self.name, **written, **rope, **self.write(model)}


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def no_ids(model: Config, **defaults: int) -> dict[str, None]:
    """Returns null for the keys of special tokens whose default in the family (`defaults`) is no token of a model."""
    return {name: None for name, token in defaults.items() if token >= int(model["vocab_size"])}


def head_kind(model: Config) -> str:
    """Returns the kind of a model's head."""
    return "language_model" if model["head"] is None else model["head"]["kind"]


def labels_of(count: int | None) -> dict[str, Any]:
    """Returns the keys of config.json that number the labels of a head."""
    numbers = range(count or 0)
    return dict(id2label={str(n): f"LABEL_{n}" for n in numbers}, label2id={f"LABEL_{n}": n for n in numbers})


def read_labels(file: Config) -> int:
    """Returns the number of labels that a config.json says; 2 where it says nothing, as in transformers."""
    return len(file["id2label"]) if file["id2label"] else file["num_labels"] or 2


def read_text_head(file: Config, **more: Any) -> dict[str, Any]:
    """Returns the head that gives each text one of some labels, or numbers."""
    labels = read_labels(file)
    is_number = file["problem_type"] == "regression" or labels == 1
    return dict(kind="regression" if is_number else "sequence", num_labels=labels, **more)


def write_labels(model: Config) -> dict[str, Any]:
    """Returns what a config.json says of the labels of a model's head."""
    numbers = dict(problem_type="regression") if head_kind(model) == "regression" else {}
    return labels_of(model["head"]["num_labels"]) | numbers


def read_architecture(file: Config, *known: str) -> str:
    """Returns the architecture of a config.json; the last of those that are known where it names none.

    Raises:
        ConfigError: It is another one.
    """
    found = next(iter(file["architectures"] or ()), known[-1])
    if found not in known:
        raise ConfigError(f"config.json has architectures: {found}, which is not supported; known: {', '.join(known)}")
    return found


def label_names(config: Config) -> tuple[str, ...] | None:
    """Returns the names of the labels in a config.json, in the order of the outputs; None: it names none."""
    labels = config.get("id2label")
    if not isinstance(labels, Mapping):
        return None
    numbers = [str(number) for number in range(len(labels))]
    return tuple(str(labels[number]) for number in numbers) if all(number in labels for number in numbers) else None
