"""A run made of a published model: its checkpoint at step 0, which every command opens."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import load_config
from jaxtrain.config.files import is_run
from jaxtrain.config.model import published_from
from jaxtrain.config.published import published_settings
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.interop.families.family import label_names
from jaxtrain.interop.formats.hub import published_place, read_published_config, tokenizer_origin
from jaxtrain.interop.formats.peft_reading import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.interop.save import TEXT_FILES
from jaxtrain.interop.settings import check_fits, fresh_parts
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.run.directory import RunLock
from jaxtrain.run.published import FOLDER
from jaxtrain.run.record import RunRecord
from jaxtrain.run.restore import describe_start, start_of, trained_leaves
from jaxtrain.run.resume import own_parts, run_metadata
from jaxtrain.run.texts import texts_beside
from jaxtrain.runtime import distributed
from jaxtrain.train.assemble import assemble, open_run_data
from jaxtrain.train.base import without_base
from jaxtrain.train.own_step import OwnStep

# Rows of what is not there are made up: nothing is trained on them.
_MADE_UP_ROWS = 64
_LONGEST_ROW = 512


def import_run(
    path: str | Path,
    run_dir: str | Path,
    *,
    overrides: Iterable[str] = (),
    base: str | Path | None = None,
    emulate: int | None = None,
) -> Path:
    """Makes the directory of a run of a published model, or of an adapter and its `base`.

    Raises:
        ConfigError: There is a run already, or a setting does not fit the model.
        CheckpointError: The published files are missing or damaged.
    """
    run_dir = Path(run_dir)
    if is_run(run_dir):
        raise ConfigError(f"{run_dir} is a run already; name a new directory")
    path = Path(published_place(path, what="import"))
    base = None if base is None else Path(published_place(base, what="--base"))
    loaded = load_config(_config(path, base), overrides=overrides, origin="import")
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache)
    config, spent, main = loaded.config, TimeSpent(), distributed.is_main_process()
    check_fits(config.model)
    run = assemble(config, open_run_data(config), name=run_dir.name)
    check_class_order(config, (run.data.reading or {}).get("classes"))
    start = start_of(run, OwnStep())
    with spent.measure("creating state"):
        state = jax.block_until_ready(run.step.init(config.seed, **start))
    run_dir.mkdir(parents=True, exist_ok=True)
    with distributed.on_main_process(RunLock(run_dir)):
        metadata = run_metadata(run, own_parts(model=None, task=None, data=None))
        below = describe_start(run, state, start)
        metadata["base"] = None if below is None else below.as_json()
        record = RunRecord(run_dir, spent)
        record.open(loaded, run, metadata)
        record.begin()
        if base is not None and main:
            _keep_texts(run_dir / FOLDER, path, base)
        with spent.measure("saving"), Checkpointer(run_dir / "checkpoints") as checkpointer:
            checkpointer.save(0, without_base(state, trained_leaves(run.step)), metadata=metadata)
        record.close("imported", {}, Progress(process_index=1))
    return run_dir


def check_class_order(config: Config, classes: Sequence[str] | None) -> None:
    """Raise where a published head that a run starts from has the classes of its data in another order."""
    path = published_from(config.model)
    if path is None or classes is None or config.finetune.adapter is not None or fresh_parts(config.model):
        return
    names = label_names(read_published_config(Path(path))) or []
    if list(classes) != list(names) and sorted(classes) == sorted(names):
        raise ConfigError(
            f"the head of {path} gives {', '.join(names[:3])}, ..., and the data numbers its classes "
            f"{', '.join(classes[:3])}, ...; write them as numbers (0 for {names[0]}, 1 for {names[1]}, ...)"
        )


def _config(path: Path, base: Path | None) -> dict[str, Any]:
    """The config of a run of a published model, or of an adapter over one: nothing of it is trained here."""
    more: dict[str, Any] = {}
    if is_adapter_folder(path):
        if base is None:
            named = open_adapter_folder(path).config.base or "a base that it does not name"
            raise ConfigError(f"{path} is an adapter of {named}; write --base and the folder of that model")
        path, more = base, {"finetune": {"adapter": str(path)}}
    elif base is not None:
        raise ConfigError(f"--base {base} is for adapters, and {path} has no {CONFIG}; leave --base out")
    settings = published_settings(str(path))
    tree = {"model": {"from": str(path)}, "optimizer": {"kind": "sgd", "momentum": 0.0}, **more}
    made_up = {"kind": "synthetic", "num_rows": _MADE_UP_ROWS}
    if "num_classes" in settings:
        size, classes = settings.get("image_size", 224), settings["num_classes"]
        data = {**made_up, "task": "images", "image_size": size, "num_classes": classes}
        return tree | {"task": "classification", "data": data}
    length = min(settings["max_sequence_length"], _LONGEST_ROW)
    if tokenizer_origin(path) is not None:
        return tree | {"data": {"kind": "text", "sequence_length": length}}
    sizes = {"vocab_size": settings["vocab_size"], "sequence_length": length}
    return tree | {"data": {**made_up, "task": "tokens", **sizes}}


def _keep_texts(kept: Path, adapter: Path, base: Path) -> None:
    """Writes the chat template that an adapter came with over that of its base, in a run of both."""
    file = tokenizer_origin(base)
    files = {} if file is None else texts_beside(file, adapter)
    if file is None or files == texts_beside(file, None):
        return
    for name in TEXT_FILES:
        (kept / name).unlink(missing_ok=True)
        if name in files:
            (kept / name).write_bytes(files[name].encode())
