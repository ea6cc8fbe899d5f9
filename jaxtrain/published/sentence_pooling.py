"""How a folder of sentence-transformers makes an embedding of a text: modules.json and what it names. No jax here.

Its config.json says the encoder alone, so that the pooling of the family (BERT: a layer over the first token) is not
the one that the embeddings of such a model were trained with.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.config_file import read_json
from jaxtrain.published.json_text import parse_json

MODULES_FILE = "modules.json"
# Key of a Pooling module that is true -> our pooling.
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_INSTEAD = "serve it with a pooling of your own (model.head.kind=embedding model.head.pooling=mean)"


def read_sentence_head(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the keys of our head for a published encoder without a head; None: the folder does not say it.

    Args:
        folder: The published folder.
        settings: The keys of our model group that its config.json gives.

    Raises:
        ConfigError: It asks for a module or a pooling that is not known.
    """
    file = folder / MODULES_FILE
    if (settings.get("head") or {}).get("kind") != "embedding" or not file.is_file():
        return None
    pooling, normalize = None, False
    for module in _modules(file):
        kind, path = str(module.get("type")).rpartition(".")[2], module.get("path")
        if kind == "Pooling" and pooling is None and isinstance(path, str):
            pooling = _pooling(folder / path / "config.json")
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{file} has a module {kind}, and Transformer, Pooling and Normalize are known; {_INSTEAD}"
            )
    if pooling is None:
        return None
    return {"kind": "embedding", "pooling": pooling, "hidden": "none", "normalize": normalize}


def _modules(file: Path) -> list[Mapping[str, Any]]:
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{file} holds no list of modules; fetch it again")
    return found


def _pooling(file: Path) -> str:
    chosen = [key for key, value in read_json(file, ConfigError).items() if key.startswith("pooling_mode") and value]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        known = " or ".join(_POOLINGS)
        raise ConfigError(f"{file} has {', '.join(chosen) or 'no pooling_mode'}, and {known} is known; {_INSTEAD}")
    return _POOLINGS[chosen[0]]
