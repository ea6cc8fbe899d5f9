"""A run made of a published model, and a published folder made of a run."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import load_config
from jaxtrain.config.base import Group
from jaxtrain.config.published import published_settings
from jaxtrain.config.saved_run import is_run, read_run
from jaxtrain.errors import ConfigError
from jaxtrain.interop.fresh import check_fits, fresh_parts
from jaxtrain.interop.save import write_published
from jaxtrain.interop.settings import settings_of
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.published.config_file import tokenizer_origin
from jaxtrain.run.lock import RunLock
from jaxtrain.run.open_run import open_run
from jaxtrain.run.own_parts import own_parts
from jaxtrain.run.published import origin_of
from jaxtrain.run.record import open_record
from jaxtrain.run.resume import run_metadata
from jaxtrain.runtime import distributed
from jaxtrain.train.assemble import assemble, open_run_data

# Rows of what is not there are made up: nothing is trained on them.
_MADE_UP_ROWS = 64
_LONGEST_ROW = 512


def import_run(
    path: str | Path, run_dir: str | Path, *, overrides: Iterable[str] = (), emulate: int | None = None
) -> Path:
    """Makes the directory of a run of a published model: its checkpoint at step 0, which every command opens.

    Args:
        path: The published folder or file.
        run_dir: The directory to make.
        overrides: Settings of the run, as on the command line ("optimizer.kind=adamw").
        emulate: Number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The directory.

    Raises:
        ConfigError: There is a run already, or a setting does not fit the model.
        CheckpointError: The published files are missing or damaged.
    """
    run_dir = Path(run_dir)
    if is_run(run_dir):
        raise ConfigError(f"{run_dir} is a run already; name a new directory")
    loaded = load_config(_defaults(str(path)), overrides=overrides, origin="import")
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache)
    config, spent = loaded.config, TimeSpent()
    check_fits(config.model)
    main = distributed.is_main_process()
    run = assemble(config, open_run_data(config), name=run_dir.name)
    start: dict[str, Any] = {"params": str(path), "skip": fresh_parts(config.model)}
    with spent.measure("creating state"):
        state = jax.block_until_ready(run.step.init(config.seed, **start))
    run_dir.mkdir(parents=True, exist_ok=True)
    with distributed.on_main_process(RunLock(run_dir)):
        metadata = run_metadata(run, own_parts(model=None, task=None, data=None)) | {"digests": None}
        record = open_record(loaded, run, run_dir, start=0, has_ended=False, metadata=metadata, spent=spent, main=main)
        record.begin(run)
        with spent.measure("saving"), Checkpointer(run_dir / "checkpoints") as checkpointer:
            checkpointer.save(0, state, metadata=metadata)
        record.close("imported", {}, Progress(process_index=1))
    return run_dir


def export_run(
    run_dir: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    step: int | None = None,
    emulate: int | None = None,
) -> Path:
    """Writes a checkpoint of a run as a published folder.

    Args:
        run_dir: Directory of the run.
        folder: The folder to make; it may exist if it is empty.
        dtype: float32, float16 or bfloat16; None: that of the published model that the run started from, else float32.
        max_shard_size: Most bytes per file, as in "5GB".
        step: Step of the checkpoint; None: the newest intact one.
        emulate: Number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder is not empty, or no published family has the run's model.
        CheckpointError: There is no intact checkpoint.
    """
    run_dir = Path(run_dir)
    info = read_run(run_dir)
    distributed.start(emulate=emulate, compilation_cache=None)
    run = open_run(run_dir, step=step)
    tokenizer = run_dir / "tokenizer.json"
    return write_published(
        folder,
        _settings(run.config.model, info.get("data") or {}),
        run.params,
        run.model_state,
        origin=origin_of(run_dir),
        dtype=dtype,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None,
    )


def _settings(model: Group, data: Mapping[str, Any]) -> dict[str, Any]:
    """The model group with the sizes that its config left to the data."""
    settings = settings_of(model, vocab_size=data.get("vocab_size"))
    if "num_classes" in settings and settings["num_classes"] is None:
        settings["num_classes"] = data.get("num_outputs")
    head = settings.get("head")
    if head is not None and head.get("num_labels", 0) is None:
        settings["head"] = {**head, "num_labels": data.get("num_outputs")}
    return settings


def _defaults(path: str) -> dict[str, Any]:
    """A config for a model that is not trained here: an optimizer without state, and rows of the model's kind."""
    settings = published_settings(path)
    found: dict[str, Any] = {"model": {"from": path}, "optimizer": {"kind": "sgd", "momentum": 0.0}}
    if "num_classes" in settings:
        size, classes = settings.get("image_size", 224), settings["num_classes"]
        data = {"task": "images", "image_size": size, "num_classes": classes}
        return found | {"task": "classification", "data": {"kind": "synthetic", "num_rows": _MADE_UP_ROWS, **data}}
    length = min(settings["max_sequence_length"], _LONGEST_ROW)
    if tokenizer_origin(Path(path)) is not None:
        return found | {"data": {"kind": "text", "sequence_length": length}}
    data = {"task": "tokens", "vocab_size": settings["vocab_size"], "sequence_length": length}
    return found | {"data": {"kind": "synthetic", "num_rows": _MADE_UP_ROWS, **data}}
