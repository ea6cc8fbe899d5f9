"""A finished (or running) run, opened for evaluation and sampling on whatever devices there are.

Reading `run.json` needs no jax; the parts that do import it themselves.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.directory import DamagedError
from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.run.called_sources import called_sources, source_changes
from jaxtrain.run.own_parts import check_evaluable

if TYPE_CHECKING:
    from jaxtrain.data import Data, Tokenizer
    from jaxtrain.models.model import ModelState, Params
    from jaxtrain.models.sharded import ShardedModel
    from jaxtrain.run.evaluation import Evaluator
    from jaxtrain.train.state import EvaluationState


@dataclass(frozen=True)
class OpenedRun:
    """A run with its parameters on the current mesh.

    Attributes:
        run_dir: its directory.
        config: of the run, with its parallel degrees replaced by those of this machine.
        checkpoint_step: the step whose parameters these are.
        sharded_model: the run's model on this machine's mesh.
        evaluator: of the run's task; None where the data was not opened.
        params: parameters, or their moving average where the run keeps one.
        model_state: batch statistics and the like, or their moving average where the run keeps one.
        tokenizer: what made the run's tokens, where that is known.
        data: the run's data, when it was opened.
        remarks: lines for people.
    """

    run_dir: Path
    config: Config
    checkpoint_step: int
    sharded_model: "ShardedModel"
    evaluator: "Evaluator | None"
    params: "Params"
    model_state: "ModelState"
    tokenizer: "Tokenizer | None"
    data: "Data | None"
    remarks: tuple[str, ...]

    @property
    def state(self) -> "EvaluationState":
        """What the evaluator reads."""
        from jaxtrain.train.state import EvaluationState

        return EvaluationState(self.params, self.model_state)


def read_run(run_dir: str | Path) -> dict[str, Any]:
    """The content of a run's `run.json`.

    Raises:
        ConfigError: the path is not the directory of a run.
    """
    path = local_path(run_dir, what="run directory")
    if not path.exists():
        raise ConfigError(f"no run at {path}; give the directory of a run, with its run.json (runs/<name>)")
    if not path.is_dir():
        raise ConfigError(f"{path} is a file; give the directory of a run, with its run.json (runs/<name>)")
    try:
        info = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        parent = path.resolve().parent
        near = f"; did you mean {parent}?" if (parent / "run.json").is_file() else ""
        raise ConfigError(f"{path} is not a run: it has no run.json{near}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path / 'run.json'}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path / 'run.json'} is not JSON; it was not written by jaxtrain, or is damaged") from None
    if not isinstance(info, dict) or not isinstance(info.get("config"), dict):
        raise ConfigError(f"{path / 'run.json'} holds no config; it was not written by jaxtrain")
    return info


def saved_config(run_dir: str | Path, *, overrides: Iterable[str] = ()) -> Loaded:
    """The config of a run for this machine.

    The saved degrees (and kernels) say how the run was trained, not what is here, so `data` takes all devices unless an
    override says otherwise. Text is read with the tokenizer that was saved with the run: another one, trained on other
    text, would give the ids other meanings.

    Args:
        run_dir: directory of the run.
        overrides: `key=value` strings on top.
    """
    run_dir = local_path(run_dir, what="run directory")
    saved = dict(read_run(run_dir)["config"])
    parallel = saved.get("parallel")
    if isinstance(parallel, dict):
        saved["parallel"] = {key: value for key, value in parallel.items() if key == "max_replicated_fraction"}
    # What computes attention and how logits are chunked was for the hardware of the run; neither changes a number.
    for group, keys in (("model", ("attention",)), ("loss", ("logits", "block"))):
        if isinstance(saved.get(group), dict):
            saved[group] = {key: value for key, value in saved[group].items() if key not in keys}
    given = list(overrides)
    tokenizer = run_dir / "tokenizer.json"
    loaded = load_config(saved, overrides=given, origin="run.json")
    chose_tokenizer = any(override.removeprefix("--").startswith("data.tokenizer") for override in given)
    if hasattr(loaded.config.data, "tokenizer") and tokenizer.is_file() and not chose_tokenizer:
        keywords = {"data.tokenizer.kind": "file", "data.tokenizer.path": str(tokenizer)}
        loaded = load_config(saved, overrides=given, keywords=keywords, origin="run.json")
    return loaded


def open_run(
    run_dir: str | Path,
    *,
    overrides: Iterable[str] = (),
    step: int | None = None,
    with_data: bool = True,
    quantize: str | None = None,
    report: Callable[[str], None] | None = None,
) -> OpenedRun:
    """Open a run: only parameters and model state are read, straight into the shardings of the current mesh.

    Args:
        run_dir: directory of the run.
        overrides: `key=value` strings on top of the run's config.
        step: which checkpoint; None: the newest intact one.
        with_data: open the data; False for generation, which needs the saved tokenizer alone.
        quantize: a format of `models.quantize.FORMATS` for the linear layers; None: as they were trained.
        report: receives one line for each damaged checkpoint that is passed over.

    Raises:
        ConfigError: not a run, a needed part came from Python, without data not a text model, or a model that cannot
            be quantized.
        CheckpointError: no such checkpoint, or one of another model.
        DataError: the data cannot be opened.
    """
    run_dir = local_path(run_dir, what="run directory")
    info = read_run(run_dir)
    overrides = list(overrides)
    other_data = any(override.removeprefix("--").startswith("data.") for override in overrides)
    # Text from a model is the same whatever it was compared with.
    needed = ("model", "task", *([] if other_data else ["data"])) if with_data else ("model",)
    check_evaluable(info, run_dir, needed=needed)
    config = saved_config(run_dir, overrides=overrides).config
    checkpoints = _existing_checkpoints(run_dir, step)
    from jaxtrain.data import load_tokenizer
    from jaxtrain.train.assemble import build_sharded_model

    saved_tokenizer = run_dir / "tokenizer.json"
    tokenizer = load_tokenizer(saved_tokenizer) if saved_tokenizer.is_file() else None
    remarks: list[str] = []
    if with_data:
        data, read_otherwise = _open_data(config, info)
        _check_tokenizer(data, tokenizer, run_dir)
        remarks += read_otherwise
        config, changed = _dividing_batch(config)
        remarks += changed
        if not other_data:
            remarks += _data_changes(info, data)
        evaluator = _evaluator(config, data)
        sharded_model = evaluator.feed.sharded_model
        remarks += source_changes(info, called_sources(config, among=("model", "task")))
    else:
        data = evaluator = None
        if config.model.kind != "transformer":
            raise ConfigError(f"model.kind={config.model.kind} of {run_dir} does not generate text")
        if tokenizer is None:
            raise ConfigError(f"{run_dir} has no tokenizer.json: it was not trained on text, so it cannot continue any")
        sharded_model = build_sharded_model(
            config, input_shape=(config.model.max_sequence_length,), vocab_size=tokenizer.vocab_size
        )
    found, params, model_state = _restore(run_dir, config, checkpoints, sharded_model, step, report)
    if quantize is not None:
        params, remark = _quantized(params, sharded_model, quantize)
        remarks.append(remark)
    return OpenedRun(
        run_dir, config, found, sharded_model, evaluator, params, model_state, tokenizer, data, tuple(remarks)
    )


def _evaluator(config: Config, data: "Data") -> "Evaluator":
    """The evaluator of a run, once its data is known to fit its model, its task and this machine."""
    from jaxtrain.models.tasks import build_task
    from jaxtrain.run.evaluation import Evaluator
    from jaxtrain.train.assemble import build_sharded_model, check_fit, parallelism_of, training_batches

    spec = training_batches(config, data).spec()
    check_fit(config, data, spec["targets"], own_task=False)
    evaluator = Evaluator(
        build_sharded_model(
            config, input_shape=data.input_shape, vocab_size=data.vocab_size, num_outputs=data.num_outputs
        ),
        build_task(config),
        parallelism=parallelism_of(config),
        compiler_options=config.compiler_options,
    )
    evaluator.feed.shardings(spec)  # a batch that does not divide fails here, before anything is restored
    return evaluator


def _existing_checkpoints(run_dir: Path, step: int | None) -> Checkpointer:
    checkpoints = Checkpointer(run_dir / "checkpoints", read_only=True)
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(f"no checkpoint in {checkpoints.directory}; the run saves one at its end or on a signal")
    if step is not None and step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} in {checkpoints.directory}; there are {_listed(steps)}")
    return checkpoints


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-10:]))


def _restore(
    run_dir: Path,
    config: Config,
    checkpoints: Checkpointer,
    sharded_model: "ShardedModel",
    step: int | None,
    report: Callable[[str], None] | None,
) -> "tuple[int, Params, ModelState]":
    import jax

    from jaxtrain.train.assemble import trainable_of
    from jaxtrain.train.placement import average_shapes
    from jaxtrain.train.state import averaged_model_state, merge_leaves

    wanted, wanted_state = sharded_model.abstract_params, sharded_model.abstract_model_state
    averaged = config.optimizer.ema_decay is not None
    ema, ema_state = average_shapes(sharded_model, trainable_of(config, sharded_model.model))
    needs_params = not averaged or len(jax.tree.leaves(ema)) < len(jax.tree.leaves(wanted))
    damaged: list[str] = []
    with checkpoints:
        # Both parts must be of one step, so a damaged one is passed over here and not in the checkpointer.
        for candidate in [step] if step is not None else checkpoints.steps()[::-1]:
            try:
                params = checkpoints.restore(wanted, step=candidate, prefix="params") if needs_params else None
                average = checkpoints.restore(ema, step=candidate, prefix="ema") if averaged else None
                # Frozen parameters have no average.
                restored = params if average is None else merge_leaves(average, params) if needs_params else average
                assert restored is not None
                model_state = checkpoints.restore(wanted_state, step=candidate, prefix="model_state")
                if averaged:
                    saved = checkpoints.restore(ema_state, step=candidate, prefix="ema_model_state")
                    model_state = averaged_model_state(saved, model_state)
            except DamagedError as error:
                damaged.append(str(error))
                if report is not None and step is None:
                    report(f"{error}; an older one is used")
                continue
            return candidate, restored, model_state
    raise CheckpointError(
        damaged[0] if step is not None else f"no intact checkpoint is left in {run_dir}: {damaged[0]}"
    )


def _quantized(params: "Params", sharded_model: "ShardedModel", format: str) -> "tuple[Params, str]":
    """The parameters quantized on their devices, and a line for people."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.metrics.format import format_bytes
    from jaxtrain.models.quantize import quantize, quantized_bytes

    small = jax.jit(lambda params: quantize(params, sharded_model.model, format))(params)
    compute = jnp.dtype(sharded_model.policy.compute_dtype)
    after, before = map(format_bytes, quantized_bytes(small, compute))
    return small, f"{format}: linear layers of {after} instead of {before} in {compute.name}"


def _dividing_batch(config: Config) -> tuple[Config, list[str]]:
    """The config with the smallest batch, from the configured one up, that divides by this machine's shards.

    Means over held-out rows are exact whatever the batch is, so an evaluation need not fail over it.
    """
    import jax

    from jaxtrain.layout.degrees import config_degrees, resolve_degrees
    from jaxtrain.parallel.division import batch_shards, step_microbatches

    degrees = resolve_degrees(config_degrees(config.parallel), len(jax.devices()))
    shards = batch_shards(degrees) * step_microbatches(config.parallel, degrees["pipe"], 1)
    size = -(-config.train.global_batch_size // shards) * shards
    train = config.train.model_copy(update={"global_batch_size": size, "accumulation_steps": 1})
    changed = config.model_copy(update={"train": train})
    if size == config.train.global_batch_size:
        return changed, []
    return changed, [f"batches of {size} rows instead of {config.train.global_batch_size}, to divide by {shards} parts"]


def _open_data(config: Config, info: Mapping[str, Any]) -> tuple["Data", list[str]]:
    """The data of the config, its values turned into numbers as in training, and a remark where that is not known."""
    from jaxtrain.data import open_data

    saved = info.get("data") or {}
    length = getattr(config.model, "max_sequence_length", None)
    task = config.task if isinstance(config.task, str) else None
    data = open_data(config.data, sequence_length=length, seed=config.seed, task=task, reading=saved.get("reading"))
    same = saved.get("fingerprint") == json.loads(json.dumps(data.fingerprint))
    if data.reading is None or saved.get("reading") is not None or same:
        return data, []
    return data, [
        "run.json does not say how the run scaled its inputs and numbered its classes; those of this data are used, "
        "and metrics are wrong where they differ"
    ]


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


def _data_changes(info: Mapping[str, Any], data: "Data") -> list[str]:
    """A remark when the data is not what the run was trained on: its held-out rows are others then."""
    before = (info.get("data") or {}).get("fingerprint")
    after = json.loads(json.dumps(data.fingerprint))
    if before is None or before == after:
        return []
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    return [f"the data has changed since the run ({', '.join(differ)}): rows it was trained on may be among these"]
