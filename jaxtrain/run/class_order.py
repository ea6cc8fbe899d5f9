"""Whether the classes of data are numbered as those of a published model whose head a run starts from."""

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.config.published import published_from
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.interop.fresh import fresh_parts
from jaxtrain.published.config_file import read_published_config
from jaxtrain.published.heads import label_names


def check_class_order(config: Config, classes: Sequence[str] | None) -> None:
    """Raise where a published head has the classes of the data in another order, so that it would confuse them.

    Args:
        config: Of a run that starts.
        classes: Names of the classes of its data, in the order of their numbers; None: it has none.
    """
    path = published_from(config.model)
    if path is None or classes is None or config.finetune.adapter is not None or fresh_parts(config.model):
        return
    names = label_names(read_published_config(Path(path))) or []
    if list(classes) != list(names) and sorted(classes) == sorted(names):
        raise ConfigError(
            f"the head of {path} gives {', '.join(names[:3])}, ..., and the data numbers its classes "
            f"{', '.join(classes[:3])}, ...; write them as numbers (0 for {names[0]}, 1 for {names[1]}, ...)"
        )
