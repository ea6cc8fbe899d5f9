"""Whether the classes of data are numbered as those of a published model whose head a run starts from."""

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.config.model import published_from
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.interop.fresh import fresh_parts
from jaxtrain.published.config_file import read_published_config
from jaxtrain.published.heads import label_names

_SHOWN = 3


def class_notes(config: Config, classes: Sequence[str] | None) -> list[str]:
    """Returns a line for people where nothing tells that output k of a published head stands for class k of the data.

    Args:
        config: Of a run that starts.
        classes: Names of the classes of its data, in the order of their numbers; None: it has none.

    Raises:
        ConfigError: The names of both are the same, and their order is another.
    """
    path = published_from(config.model)
    if path is None or classes is None or config.finetune.adapter is not None or fresh_parts(config.model):
        return []
    names = label_names(read_published_config(Path(path)))
    numbers = [str(number) for number in range(len(classes))]
    if names is None or len(classes) != len(names) or list(classes) in (list(names), numbers):
        return []
    if set(classes) == set(names):
        raise ConfigError(
            f"the head of {path} gives {_listed(names)}, in this order, and the classes of the data are numbered "
            f"{_listed(classes)}, so that its outputs would be taken for other classes; write the classes of the data "
            f"as whole numbers (0 for {names[0]}, 1 for {names[1]}, ...)"
        )
    return [
        f"the head of {path} is read, which calls its outputs {_listed(names)}: the classes of the data, "
        f"{_listed(classes)}, are taken for them in this order"
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
