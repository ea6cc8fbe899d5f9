"""The data of a saved run, opened again: read as the run read it, and compared with what it was trained on."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.config import Config
from jaxtrain.config.data import DataConfig
from jaxtrain.errors import DataError

if TYPE_CHECKING:
    import grain

    from jaxtrain.data import Data, Tokenizer


def open_saved_data(
    config: Config, info: Mapping[str, Any], run_dir: Path, *, tokenizer: "Tokenizer | None", is_other: bool
) -> tuple["Data", list[str]]:
    """The data of a run's config, its values turned into numbers as in training, and remarks for people.

    Args:
        config: of the run.
        info: content of `run.json`.
        run_dir: for messages.
        tokenizer: the run's.
        is_other: whether the config names other data than the run's, so that a difference is no remark.

    Raises:
        DataError: the data cannot be opened, or was made with another tokenizer.
    """
    saved = info.get("data") or {}
    length = getattr(config.model, "max_sequence_length", None)
    task = config.task if isinstance(config.task, str) else None
    data = _opened(config.data, sequence_length=length, seed=config.seed, task=task, reading=saved.get("reading"))
    _check_tokenizer(data, tokenizer, run_dir)
    remarks = []
    same = saved.get("fingerprint") == json.loads(json.dumps(data.fingerprint))
    # A template of chats neither scales nor numbers anything.
    has_values = data.reading is not None and data.counts is None
    if has_values and saved.get("reading") is None and not same:
        remarks.append(
            "run.json does not say how the run scaled its inputs and numbered its classes; those of this data are "
            "used, and metrics are wrong where they differ"
        )
    return data, remarks if is_other else [*remarks, *_data_changes(saved, data)]


def _opened(config: DataConfig, **how: Any) -> "Data":
    """Data of a config, of which `validation_fraction=1` holds out all rows, since nothing is trained on them here."""
    from jaxtrain.data import open_data

    if getattr(config, "validation_fraction", None) != 1:
        return open_data(config, **how)
    # Images are read as in evaluation.
    plain = {"validation_fraction": 0.0} | ({"augment": False} if hasattr(config, "augment") else {})
    data = open_data(config.model_copy(update=plain), **how)
    return data if data.validation is not None else replace(data, validation=data.train)


def check_read_alike(data: "Data", info: Mapping[str, Any]) -> None:
    """Raise where other data was turned into numbers otherwise than the run's: its own scales, its own class numbers.

    Args:
        data: to be evaluated or predicted.
        info: content of the run's `run.json`.

    Raises:
        DataError: says how to open it as the run does.
    """
    saved: Any = (info.get("data") or {}).get("reading")
    # A template of chats neither scales nor numbers anything.
    if saved is None or data.reading is None or data.counts is not None or saved["kind"] != data.reading["kind"]:
        return
    own = json.loads(json.dumps(data.reading))
    for key, what in (("classes", "numbers its classes"), ("mean", "scales its columns"), ("deviation", "scales them")):
        if saved.get(key) != own.get(key):
            raise DataError(
                f"this data {what} by itself, otherwise than the run's; write jaxtrain.open_data({{...}}, "
                'reading=run.info["data"]["reading"])'
            )


def rows_of_given(data: Any, info: Mapping[str, Any]) -> "Data | grain.MapDataset":
    """What `OpenedRun.evaluate` is given, as data or rows with an index.

    Args:
        data: see there.
        info: content of the run's `run.json`.

    Raises:
        DataError: they are not read as the run read its own.
        ConfigError: they are something else.
    """
    import grain

    from jaxtrain.data import Data
    from jaxtrain.data.sources.given import rows_of

    if isinstance(data, Data):
        check_read_alike(data, info)
        return data
    if isinstance(data, grain.MapDataset):
        return data
    reading: Any = (info.get("data") or {}).get("reading")
    if reading is not None and "mean" in reading:
        raise DataError(
            "the run scaled the columns of its table, and arrays do not say whether theirs are; write "
            'jaxtrain.open_data({...}, reading=run.info["data"]["reading"]), or jaxtrain.ArrayRows({...}) of columns '
            "that are scaled as the run's"
        )
    return rows_of(data)


def built_from(config: Config, info: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """What the model of a run is built from: its config, with the scale of the table that it was trained on, and sizes.

    Args:
        config: of the run.
        info: content of `run.json`.

    Returns:
        The config, and the arguments `input_shape`, `vocab_size` and `num_outputs` of `build_sharded_model`.
    """
    from jaxtrain.train.output_scale import with_output_scale

    task = info.get("task") if info.get("task_is_shipped", True) else None
    scaled = with_output_scale(config, (info.get("data") or {}).get("reading"), task=task)
    saved = info["data"]
    found = {name: saved.get(name) for name in ("vocab_size", "num_outputs")}
    return scaled, {"input_shape": tuple(saved["input_shape"]), **found}


def _check_tokenizer(data: "Data", tokenizer: "Tokenizer | None", run_dir: Path) -> None:
    """Raise where the ids of token shards were made with another tokenizer than the run's."""
    from jaxtrain.data.tokenizer import tokenizer_sha256

    if tokenizer is None:
        return
    for source in data.fingerprint.get("components", [data.fingerprint]):
        # Text was encoded on opening, with the run's tokenizer unless an override asked for another.
        if source.get("kind") == "tokens" and source["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
            raise DataError(
                f"the token shards ({data.description[0]}) were made with another tokenizer than the run's; prepare "
                f"them again with data.tokenizer.kind=file data.tokenizer.path={run_dir / 'tokenizer.json'}"
            )


def _data_changes(saved: Mapping[str, Any], data: "Data") -> list[str]:
    """A remark when the data is not what the run was trained on: its held-out rows are others then."""
    before = saved.get("fingerprint")
    after = json.loads(json.dumps(data.fingerprint))
    if before is None or before == after:
        return []
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    return [f"the data has changed since the run ({', '.join(differ)}): rows it was trained on may be among these"]
