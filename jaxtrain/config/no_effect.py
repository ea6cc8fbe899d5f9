"""Keys that somebody set and that do nothing beside the others: a note each, since a layout may come and go."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config.encoder_decoder import EncoderDecoderConfig
from jaxtrain.config.published import published_from
from jaxtrain.config.schema import Config
from jaxtrain.config.transformer import TransformerConfig
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


def no_effect_notes(config: Config, origins: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each key that has no effect.

    Args:
        config: validated.
        origins: dotted keys that somebody set -> where.
    """
    # The config that a run keeps holds every key: what is at its default asks for nothing.
    default, reasons = _default(config), tuple(_reasons(config))
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
    """The defaults, those of the model by its kind."""
    model = config.model
    return Config(model=type(model)()) if isinstance(model, TransformerConfig | EncoderDecoderConfig) else Config()


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
            ("context_attention", "context"),
            ("sequence_parallel", "tensor"),
        ):
            if getattr(parallel, axis) == 1:
                yield f"parallel.{key}", f"parallel.{axis} is 1"
    if evaluation.sample_prompt is None:
        for key in ("sample_tokens", "sample_temperature"):
            yield f"evaluation.{key}", "evaluation.sample_prompt is null"
    if config.profile.start_step is None:
        yield "profile.num_steps", "profile.start_step is null"
    elif config.profile.start_step >= config.train.steps:
        yield "profile", f"the first profiled step comes after the last one, train.steps={config.train.steps}"


def _of_transformer(model: TransformerConfig) -> Iterator[tuple[str, str]]:
    if not model.has_output_layer:
        for key in _OUTPUT_LAYER:
            yield f"model.{key}", f"model.head.kind={model.head_kind} has no logits of the vocabulary"
    longest, local = model.max_sequence_length, model.local_layers
    window = model.sliding_window if local is None else local.window
    if window is not None and window >= longest:
        key = "sliding_window" if local is None else "local_layers.window"
        yield f"model.{key}", f"it hides nothing of model.max_sequence_length={longest}"
