"""Whether the sizes of a config's model take the rows of its data. No jax here: the planner asks too."""

from jaxtrain.config.published import published_from
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError


def check_sizes(
    config: Config,
    *,
    vocab_size: int | None,
    num_outputs: int | None,
    sequence_length: int | None,
    decoder_length: int | None,
) -> None:
    """Raise where rows have more tokens, token ids or classes than the model has room for.

    Args:
        config: with a model of its own; what the model leaves to the data is not compared.
        vocab_size: token ids of the data; None: not known.
        num_outputs: its classes or targets; None: not known, or none.
        sequence_length: tokens of a row; None: rows are not of tokens.
        decoder_length: tokens of a row of a decoder beside an encoder; None: rows have none.

    Raises:
        ConfigError: names the settings that contradict one another.
    """
    vocabulary = getattr(config.model, "vocab_size", None)
    if vocabulary is not None and vocab_size is not None and vocab_size > vocabulary:
        published = published_from(config.model)
        write = f"set model.vocab_size={vocab_size} or more, or leave it out"
        if published is not None:
            write = f"set data.tokenizer.kind=file and data.tokenizer.path to the tokenizer of {published}"
        raise ConfigError(f"model.vocab_size={vocabulary} is below the {vocab_size} token ids of the data; {write}")
    head = getattr(config.model, "head", None)
    classes = getattr(config.model, "num_classes", None) or getattr(config.model, "num_outputs", None)
    classes = classes or getattr(head, "num_labels", None)
    if classes is not None and num_outputs is not None and num_outputs > classes:
        raise ConfigError(f"the model has {classes} outputs but the data {num_outputs} classes or columns")
    longest = getattr(config.model, "max_sequence_length", None)
    if sequence_length is not None and longest is not None and sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length={sequence_length} exceeds model.max_sequence_length={longest}; lower it"
        )
    if decoder_length is not None and longest is not None and decoder_length > longest:
        raise ConfigError(
            f"targets of {decoder_length} tokens exceed model.max_sequence_length={longest}; lower "
            "data.target_length, or the part that data.corruption hides"
        )
