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
from jaxtrain.data import load_tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.interop.companions import companions
from jaxtrain.interop.fresh import check_fits
from jaxtrain.interop.packing import Packing
from jaxtrain.interop.peft import write_adapter
from jaxtrain.interop.pretrained import load_pretrained
from jaxtrain.interop.save import Origin, saved_dtypes, write_published
from jaxtrain.interop.settings import settings_of
from jaxtrain.interop.weights import StoredParameter
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.time_spent import TimeSpent
from jaxtrain.published.config_file import tokenizer_origin
from jaxtrain.published.hub import published_place
from jaxtrain.published.peft import CONFIG, is_adapter_folder, open_adapter_folder
from jaxtrain.run.base import describe_start, start_of, trained_leaves
from jaxtrain.run.class_order import class_notes
from jaxtrain.run.exported_texts import exported_texts
from jaxtrain.run.kept_tokenizer import tokenizer_file
from jaxtrain.run.lock import RunLock
from jaxtrain.run.mended import mend_run
from jaxtrain.run.merged import with_stored_base, write_merged
from jaxtrain.run.open_run import open_run
from jaxtrain.run.own_parts import own_parts
from jaxtrain.run.published import base_of_adapters, keep_texts, origin_of
from jaxtrain.run.record import open_record
from jaxtrain.run.resume import run_metadata
from jaxtrain.run.special import beginning_note
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.train.assemble import assemble, open_run_data
from jaxtrain.train.base import without_base
from jaxtrain.train.own_step import OwnStep

# Rows of what is not there are made up: nothing is trained on them.
_MADE_UP_ROWS = 64
_LONGEST_ROW = 512
# Policies that read frozen parameters as they are stored.
_FLOAT32 = ("fp32", "tf32")


def import_run(
    path: str | Path,
    run_dir: str | Path,
    *,
    overrides: Iterable[str] = (),
    base: str | Path | None = None,
    emulate: int | None = None,
) -> Path:
    """Makes the directory of a run of a published model: its checkpoint at step 0, which every command opens.

    Args:
        path: The published folder or file, its id on the Hugging Face hub, or the folder of an adapter.
        run_dir: The directory to make.
        overrides: Settings of the run, as on the command line ("optimizer.kind=adamw").
        base: The published model that an adapter is of.
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
    path = Path(published_place(path, what="import"))
    base = None if base is None else Path(published_place(base, what="--base"))
    loaded = load_config(_imported(path, base), overrides=overrides, origin="import")
    distributed.start(emulate=emulate, compilation_cache=loaded.config.compilation_cache)
    config, spent = loaded.config, TimeSpent()
    check_fits(config.model)
    main = distributed.is_main_process()
    run = assemble(config, open_run_data(config), name=run_dir.name)
    for note in class_notes(config, (run.data.reading or {}).get("classes")):
        print_remark(note)
    start = start_of(run, OwnStep())
    with spent.measure("creating state"):
        state = jax.block_until_ready(run.step.init(config.seed, **start))
    run_dir.mkdir(parents=True, exist_ok=True)
    with distributed.on_main_process(RunLock(run_dir)):
        metadata = run_metadata(run, own_parts(model=None, task=None, data=None))
        below = describe_start(run, state, start)
        metadata["base"] = None if below is None else below.as_json()
        record = open_record(loaded, run, run_dir, start=0, has_ended=False, metadata=metadata, spent=spent, main=main)
        record.begin(run)
        if base is not None and main:
            keep_texts(run_dir, path, base=Path(base))
        with spent.measure("saving"), Checkpointer(run_dir / "checkpoints") as checkpointer:
            checkpointer.save(0, without_base(state, trained_leaves(run.step)), metadata=metadata)
        record.close("imported", {}, Progress(process_index=1))
    return run_dir


def export_run(
    run_dir: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    step: int | None = None,
    merge: bool = False,
    base: str | None = None,
    emulate: int | None = None,
) -> Path:
    """Writes a checkpoint of a run as a published folder; of a run with adapters, these alone, as PEFT has them.

    Args:
        run_dir: Directory of the run.
        folder: The folder to make; it may exist if it is empty.
        dtype: float32, float16 or bfloat16; None: that of the published model that the run started from, else float32.
        max_shard_size: Most bytes per file, as in "5GB".
        step: Step of the checkpoint; None: the newest intact one.
        merge: Whether adapters are added to their base, and all weights are written.
        base: "nf4": linear layers are written in 4 bits, as bitsandbytes does; None: in floats.
        emulate: Number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The folder.

    Raises:
        ConfigError: The folder is not empty, no published family has the run's model, or there is nothing to merge.
        CheckpointError: There is no intact checkpoint, or what was merged is not what was trained.
    """
    run_dir = Path(run_dir)
    mend_run(run_dir)
    info = read_run(run_dir)
    distributed.start(emulate=emulate, compilation_cache=None)
    run = open_run(run_dir, step=step)
    # Its second copy, where the first one is damaged: what is written is for programs that know of no copies.
    file, origin = tokenizer_file(run_dir, info, print_remark), origin_of(run_dir)
    settings = _settings(run.config.model, info.get("data") or {})
    tokenizer = None if file is None else file.read_text(encoding="utf-8")
    model = run.sharded_model.model
    has_adapters = model.adapted is not None and model.adapted.lora is not None
    if merge and not has_adapters:
        raise ConfigError(f"{run_dir} has no adapters to merge; leave --merge out")
    if has_adapters and not merge and base is not None:
        raise ConfigError(
            f"--base {base} is for weights, and adapters are written in float32; leave it out, or add --merge to write "
            "base and adapters together"
        )
    known = None if file is None else load_tokenizer(file)
    texts, replaced = exported_texts(info, known, origin, model=model, config=run.config)
    for line in (replaced, beginning_note(info, known, model)):
        if line is not None:
            print_remark(line)
    if has_adapters and not merge:
        if dtype not in (None, "float32"):
            raise ConfigError(f"--dtype {dtype} is for weights, and adapters are written in float32; leave it out")
        files = companions(texts.ids, {} if origin is None else origin.files, tokenizer, texts)
        base_name, digests = base_of_adapters(run_dir)
        quantized = run.config.finetune.base
        if quantized is not None:
            print_remark(
                f"the adapters were trained over the base in {quantized} and name it in floats ({base_name}), whose "
                "logits differ: open it quantized beside them, or export with --merge"
            )
        return write_adapter(
            folder,
            settings,
            run.params,
            model=model,
            base_config={} if origin is None else origin.config,
            base_files=files,
            base_name=base_name,
            digests=digests,
        )
    packing = None
    if base is not None:
        packing = Packing(model.linears if model.adapted is None else model.adapted.original.linears)
    if merge:
        params = run.params
        if run.config.precision.policy not in _FLOAT32:
            run = open_run(run_dir, step=run.step, overrides={"precision.policy": "fp32"})
            model, params = run.sharded_model.model, with_stored_base(run_dir, run)
        said = write_merged(
            Path(folder),
            settings,
            params,
            run.model_state,
            model=model,
            origin=origin,
            dtype=dtype,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            texts=texts,
            packing=packing,
            classes=run.classes,
        )
        print_remark(said)
        return Path(folder)
    return write_published(
        folder,
        settings,
        run.params,
        run.model_state,
        origin=origin,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer,
        texts=texts,
        packing=packing,
        classes=run.classes,
    )


def export_folder(
    path: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    base: str | None = None,
) -> Path:
    """Writes a published model as a published folder: in another dtype, in other shards or in 4 bits.

    Tensors are read, written and forgotten one at a time.

    Args:
        path: The published folder, or a .gguf file.
        folder: The folder to make; it may exist if it is empty.
        dtype: float32, float16 or bfloat16; None: that of each tensor.
        max_shard_size: Most bytes per file, as in "5GB".
        base: "nf4": linear layers are written in 4 bits, as bitsandbytes does; None: in floats.

    Returns:
        The folder.

    Raises:
        ConfigError: There is no such model, the folder is not empty, or a layer cannot be written in 4 bits.
        CheckpointError: The published files are missing or damaged.
    """
    opened = load_pretrained(path)
    held = [
        {name: StoredParameter(opened.published, place) for name, place in places.items()}
        for places in (opened.places.params, opened.places.model_state)
    ]
    return write_published(
        folder,
        settings_of(opened.config),
        *held,
        origin=Origin(opened.published.source.config, opened.published.source.files, saved_dtypes(opened.published)),
        dtype=dtype,
        max_shard_size=max_shard_size,
        packing=None if base is None else Packing(opened.model.linears),
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


def _imported(path: str | Path, base: str | Path | None) -> dict[str, Any]:
    """The config of a run of a published model, or of an adapter over one."""
    if not is_adapter_folder(path):
        if base is not None:
            raise ConfigError(f"--base {base} is for adapters, and {path} has no {CONFIG}; leave --base out")
        return _defaults(str(path))
    if base is None:
        named = open_adapter_folder(path).config.base
        raise ConfigError(
            f"{path} is an adapter of {named or 'a base that it does not name'}; write --base and the folder of that "
            "model"
        )
    return _defaults(str(base)) | {"finetune": {"adapter": str(path)}}


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
