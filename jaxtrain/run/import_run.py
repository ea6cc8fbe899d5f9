"""A run made of a published model: its checkpoint at step 0, which every command opens."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import load_config
from jaxtrain.config.files import is_run
from jaxtrain.config.fits import check_fits
from jaxtrain.config.published import published_settings
from jaxtrain.data.configured import open_run_data
from jaxtrain.errors import ConfigError
from jaxtrain.formats.hub import published_place, tokenizer_origin
from jaxtrain.formats.peft_reading import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.throughput import TimeSpent
from jaxtrain.run.assemble import assemble
from jaxtrain.run.directory import lock_run
from jaxtrain.run.record import RunRecord
from jaxtrain.run.resume import run_metadata
from jaxtrain.run.spec import RunSpec
from jaxtrain.run.start import describe_start, start_of, trained_leaves
from jaxtrain.runtime import distributed
from jaxtrain.weights.base import without_base
from jaxtrain.weights.load import load_weights

# Rows of what is not there are made up: nothing is trained on them.
_MADE_UP_ROWS = 64
_LONGEST_ROW = 512


def import_run(
    path: str | Path,
    run_dir: str | Path,
    *,
    overrides: Iterable[str] = (),
    base: str | Path | None = None,
) -> Path:
    """Make the directory of a run of a published model, or of an adapter and its `base`."""
    run_dir = Path(run_dir)
    if is_run(run_dir):
        raise ConfigError(f"{run_dir} is a run already; use a new directory")
    path = Path(published_place(path, what="import"))
    base = None if base is None else Path(published_place(base, what="--base"))
    loaded = load_config(_config(path, base), overrides=overrides, origin="import")
    config = loaded.config
    spent = TimeSpent()
    distributed.start(compilation_cache=config.compilation_cache)
    check_fits(config.model)
    run = assemble(RunSpec(dataclasses.replace(loaded, name=run_dir.name), run_dir), open_run_data(config))
    start = start_of(run)
    with spent.measure("creating state"):
        state = jax.block_until_ready(run.step.init(config.seed, load_weights(run.step, **start)))
    adapter_base = describe_start(run, state, start)
    metadata = run_metadata(run)
    metadata["base"] = None if adapter_base is None else adapter_base.as_json()
    run_dir.mkdir(parents=True, exist_ok=True)
    with distributed.on_main_process(lock_run(run_dir)):
        record = RunRecord(run_dir, spent)
        record.open(run, metadata)
        record.begin()
        with spent.measure("saving"), Checkpointer(run_dir / "checkpoints") as checkpointer:
            checkpointer.save(0, without_base(state, trained_leaves(run.step)), metadata=metadata)
        record.close("imported", {}, Progress(process_index=1))
    return run_dir


def _config(path: Path, base: Path | None) -> dict[str, Any]:
    """The config of a run of a published model, or of an adapter over one: nothing of it is trained here."""
    tree: dict[str, Any] = {"optimizer": {"kind": "sgd", "momentum": 0.0}}
    if is_adapter_folder(path):
        if base is None:
            named = open_adapter_folder(path).config.base or "a base that it does not name"
            raise ConfigError(f"{path} is an adapter of {named}; give that model with --base FOLDER")
        tree["finetune"] = {"adapter": str(path)}
        path = base
    elif base is not None:
        raise ConfigError(f"--base {base} is for adapters, and {path} has no {CONFIG}; leave --base out")
    tree["model"] = {"from": str(path)}
    settings = published_settings(str(path))
    if settings["kind"] == "clip":
        return tree | {"task": "contrastive"}  # its rows are those of `data.call`, which is given beside it
    made_up = {"kind": "synthetic", "num_rows": _MADE_UP_ROWS}
    if "num_classes" in settings:
        sizes = {"image_size": settings.get("image_size", 224), "num_classes": settings["num_classes"]}
        return tree | {"task": "classification", "data": {**made_up, "task": "images", **sizes}}
    length = min(settings["max_sequence_length"], _LONGEST_ROW)
    if tokenizer_origin(path) is not None:
        return tree | {"data": {"kind": "text", "sequence_length": length}}
    sizes = {"vocab_size": settings["vocab_size"], "sequence_length": length}
    return tree | {"data": {**made_up, "task": "tokens", **sizes}}
