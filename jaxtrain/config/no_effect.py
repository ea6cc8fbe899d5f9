"""Keys that somebody set and that do nothing beside the others: a note each, since a layout may come and go.

The path of a tokenizer that is not read is refused where nobody chose the kind beside it or after it: it is surely a
mistake, and another model would be trained.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.data import LabelledTextData, SyntheticData, TextData, TextPairData
from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.models import MLPConfig, ResNetConfig
from jaxtrain.config.published import published_from
from jaxtrain.config.schema import Config
from jaxtrain.config.spikes import ChecksConfig, SpikesConfig
from jaxtrain.config.tokenizer import TokenizerConfig
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.config.vit import ViTConfig
from jaxtrain.config.watchdog import WatchdogConfig
from jaxtrain.errors import ConfigError
from jaxtrain.published.config_file import config_origin

# Keys of a transformer or an encoder-decoder -> the positions that read them.
_POSITIONS = {
    "rope_theta": "rotary",
    "rope_scaling": "rotary",
    "rotary_fraction": "rotary",
    "local_layers.rope_theta": "rotary",
    "relative_buckets": "relative",
    "relative_max_distance": "relative",
    "position_offset": "learned",
}
# Keys of the logits of the vocabulary.
_OUTPUT_LAYER = ("tie_embeddings", "logits_scale", "logits_softcap")
# Keys of synthetic data -> the tasks that read them.
_SYNTHETIC = {
    "vocab_size": ("tokens",),
    "image_size": ("images",),
    "num_channels": ("images",),
    "num_classes": ("images", "table"),
    "num_columns": ("table",),
}
# Where a key is set, from what gives way to what does not; files come before both.
_LATER = {"command line": 1, "keyword": 2}


def check_tokenizer(config: Config, origins: Mapping[str, str]) -> None:
    """Raise where the path of a tokenizer is given to a kind of tokenizer that was there before, and is not read.

    It may stay where the kind was chosen in the same place, as in a sweep over kinds, or later, and in the config of
    a run.

    Args:
        config: validated.
        origins: dotted keys that somebody set -> where, in the order of setting.

    Raises:
        ConfigError: names the key and what reads it.
    """
    key, kind_key = "data.tokenizer.path", "data.tokenizer.kind"
    tokenizer = getattr(config.data, "tokenizer", None)
    if not isinstance(tokenizer, TokenizerConfig) or tokenizer.kind == "file" or tokenizer.path is None:
        return
    where = origins.get(key, "")
    if not where or where.endswith("run.json"):
        return
    is_older = kind_key not in origins or (
        _rank(origins, kind_key) != _rank(origins, key) and _is_later(origins, key, kind_key)
    )
    if is_older:
        raise ConfigError(
            f"{key}={tokenizer.path} ({where}) is not read, since {kind_key} is {tokenizer.kind}; set {kind_key}=file, "
            "or leave the path out"
        )


def _gave_way(origins: Mapping[str, str], key: str, to: str) -> bool:
    """Whether a key was set where what is set later, as on the command line, decides for another one."""
    return to in origins and _rank(origins, to) > _rank(origins, key) and _is_later(origins, to, key)


def _rank(origins: Mapping[str, str], key: str) -> int:
    return _LATER.get(origins[key], 0)


def _is_later(origins: Mapping[str, str], key: str, than: str) -> bool:
    """Whether a key was set after another one; a mapping in place of a file is a "keyword" that comes first."""
    keys = list(origins)
    return keys.index(key) > keys.index(than)


def no_effect_notes(config: Config, origins: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each key that has no effect.

    Args:
        config: validated.
        origins: dotted keys that somebody set -> where, in the order of setting.
    """
    # The config that a run keeps holds every key: what is at its default asks for nothing.
    default, reasons = _default(config), tuple(_reasons(config))
    reasons += tuple(
        (key, why) for key, by, why in _decided(config) if key in origins and not _gave_way(origins, key, by)
    )
    published = published_from(config.model)
    # What a published config.json says was set by nobody here, nor what a run keeps of it.
    theirs = () if published is None else (str(config_origin(Path(published))), "run.json")
    given = [key for key, where in origins.items() if not (key.startswith("model.") and where.endswith(theirs))]
    found = ((key, why) for key in given for start, why in reasons if f"{key}.".startswith(f"{start}."))
    return tuple(
        f"{key} ({origins[key]}) has no effect: {why}"
        for key, why in found
        if _value(config, key) != _value(default, key)
    )


def _default(config: Config) -> Config:
    """The defaults, those of the model and the data by their kind, and those of groups that are null by default."""
    model = config.model
    found = Config(model=type(model)()) if isinstance(model, TransformerConfig | EncoderDecoderConfig) else Config()
    groups: dict[str, Any] = {"data": type(config.data).model_construct()}
    if config.spikes is not None:
        groups["spikes"] = SpikesConfig()
    if config.watchdog is not None:
        groups["watchdog"] = WatchdogConfig()
    return found.model_copy(update=groups)


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _reasons(config: Config) -> Iterator[tuple[str, str]]:
    """Keys, or groups of keys, that do nothing, and why."""
    parallel, precision, evaluation = config.parallel, config.precision, config.evaluation
    if config.remat.policy != "names" and config.remat.names:
        yield "remat.names", f"remat.policy={config.remat.policy} decides without them; remat.policy=names takes them"
    if config.model.kind == "mlp":
        yield "remat", "model.kind=mlp has no blocks, its activations are all kept"
    if precision.policy != "fp16":
        yield "precision.loss_scale", f"precision.policy={precision.policy} does not scale the loss, fp16 does"
    if isinstance(config.model, TransformerConfig | EncoderDecoderConfig):
        position = config.model.position
        for key, reader in _POSITIONS.items():
            if reader != position:
                yield f"model.{key}", f"model.position={position} does not read it, {reader} does"
    if isinstance(config.model, TransformerConfig):
        yield from _of_transformer(config.model)
    schedule = config.optimizer.schedule.kind
    if schedule in ("constant", "inverse_sqrt"):
        for key in ("decay_steps", "final_fraction"):
            yield f"optimizer.schedule.{key}", f"optimizer.schedule.kind={schedule} decays to no end"
    if config.optimizer.learning_rate is None:
        yield (
            "optimizer.schedule",
            "optimizer.learning_rate is null, so that the function of optimizer.call has its own",
        )
    if not parallel.auto:
        for key, axis in (
            ("schedule", "pipe"),
            ("chunks", "pipe"),
            ("context_attention", "context"),
            ("sequence_parallel", "tensor"),
        ):
            if getattr(parallel, axis) == 1:
                yield f"parallel.{key}", f"parallel.{axis} is 1"
    if evaluation.sample_prompt is None:
        for key in ("sample_tokens", "sample_temperature"):
            yield f"evaluation.{key}", "evaluation.sample_prompt is null"
    if isinstance(config.data, SyntheticData):
        for key, tasks in _SYNTHETIC.items():
            if config.data.task not in tasks:
                yield (
                    f"data.{key}",
                    f"data.task={config.data.task} does not read it, {' and '.join(tasks)} do"
                    + ("" if len(tasks) > 1 else "es"),
                )
    if config.finetune.base != "nf4":
        base = config.finetune.base or "null"
        yield "finetune.double_quantization", f"finetune.base={base} does not read it, nf4 does"
    if config.watchdog is not None and not config.watchdog.enabled:
        for key in type(config.watchdog).model_fields:
            if key != "enabled":
                yield f"watchdog.{key}", "watchdog.enabled is false"
    if config.spikes is not None and config.spikes.action != "roll_back":
        for key in ("roll_back_steps", "skip_batches", "max_roll_backs"):
            yield f"spikes.{key}", f"spikes.action={config.spikes.action} does not read it, roll_back does"
    if config.checks == ChecksConfig():
        yield "checks", "checks.replay_every and checks.replicas_every are null"
    if config.profile.start_step is None:
        yield "profile.num_steps", "profile.start_step is null"
    elif config.profile.start_step >= config.train.steps:
        yield "profile", f"the first profiled step comes after the last one, train.steps={config.train.steps}"


def _decided(config: Config) -> Iterator[tuple[str, str, str]]:
    """Keys that do nothing, the key that decides so, and why; nothing is said where that one was set later."""
    data, prompt = config.data, "evaluation.sample_prompt"
    if isinstance(config.model, MLPConfig | ResNetConfig | ViTConfig):
        yield prompt, "model.kind", f"model.kind={config.model.kind} generates no text"
    elif isinstance(data, SyntheticData):
        yield prompt, "data.kind", "data.kind=synthetic has no tokenizer"
    if isinstance(data, TextData | LabelledTextData | TextPairData) and data.path is not None:
        yield "data.builtin", "data.path", "data.path is read instead"
    tokenizer = getattr(data, "tokenizer", None)
    if isinstance(tokenizer, TokenizerConfig):
        for key, kind in (("vocab_size", "bpe"), ("path", "file")):
            if tokenizer.kind != kind:
                why = f"data.tokenizer.kind={tokenizer.kind} does not read it, {kind} does"
                yield f"data.tokenizer.{key}", "data.tokenizer.kind", why


def _of_transformer(model: TransformerConfig) -> Iterator[tuple[str, str]]:
    if not model.has_output_layer:
        for key in _OUTPUT_LAYER:
            yield f"model.{key}", f"model.head.kind={model.head_kind} has no logits of the vocabulary"
    longest, local = model.max_sequence_length, model.local_layers
    window = model.sliding_window if local is None else local.window
    if window is not None and window >= longest:
        key = "sliding_window" if local is None else "local_layers.window"
        yield f"model.{key}", f"it hides nothing of model.max_sequence_length={longest}"
