"""Whether losses of several runs can be compared, and which run did best: one answer for every page."""

import json
from collections.abc import Iterator, Mapping, Sequence

from jaxtrain.metrics.report.files import RunFiles
from jaxtrain.metrics.report.headline import status_kind
from jaxtrain.metrics.report.html import mapping, number
from jaxtrain.metrics.report.tables import flat

# Weights of what is added to a loss in training alone.
_TERMS = ("z_loss", "load_balance_weight", "router_z_weight")


def can_rank(runs: Sequence[RunFiles]) -> bool:
    """Whether held-out losses are of one kind, and of the same rows."""
    kinds = {(evaluated_loss(run), held_out_rows(run), most_rows(run)) for run in runs}
    return len(kinds) == 1 and None not in next(iter(kinds))[:2]


def can_rank_training(runs: Sequence[RunFiles]) -> bool:
    """Whether training losses are of one kind, with the same terms, and of the same data."""
    kinds = {evaluated_loss(run) for run in runs}
    terms = {
        json.dumps([value for key, value in flat(run.config).items() if key.rpartition(".")[2] in _TERMS])
        for run in runs
    }
    data = {json.dumps(mapping(run.info.get("data")).get("fingerprint"), sort_keys=True) for run in runs}
    return max(map(len, (kinds, terms, data))) == 1 and None not in kinds


def winner(runs: Sequence[RunFiles]) -> int | None:
    """Place of the run with the lowest held-out loss of all its evaluations; None where runs cannot be ranked.

    A run that diverged or failed is never the best, however low its loss once was.
    """
    scored = [
        (best[1], place)
        for place, run in enumerate(runs)
        if (best := run.best()) is not None and status_kind(run.status) != "bad"
    ]
    if len(scored) < 2 or not can_rank([runs[place] for _, place in scored]):
        return None
    return min(scored)[1]


def evaluated_loss(run: RunFiles) -> str | None:
    """What identifies the loss that a run evaluates; None where it is not recorded.

    The settings of the loss of preferred answers are part of its held-out loss. Those of other losses (`z_loss`) are
    added in training alone. A task from Python is known by its name, and one that the config calls by its arguments and
    the file of its function.
    """
    task, given = run.config.get("task"), mapping(run.info.get("from_python")).get("task")
    if given is None and isinstance(task, Mapping):
        file = mapping(mapping(run.info.get("called")).get("task")).get("sha256")
        return json.dumps(
            [run.task, dict(task), *([f"file {file[:16]}"] if isinstance(file, str) else [])], sort_keys=True
        )
    if given is not None:
        if run.info.get("task_is_shipped") is True:
            # A shipped task evaluates as the one with the default settings.
            return "dpo by default" if run.task == "dpo" else run.task
        return f"{run.task} from Python"
    loss = mapping(run.config.get("loss"))
    if run.task != "dpo":
        smoothing = run.task == "classification" and loss.get("label_smoothing")
        return f"{run.task} with loss.label_smoothing {smoothing}" if smoothing else run.task
    return f"dpo with loss.beta {loss.get('beta')}, loss.label_smoothing {loss.get('label_smoothing')}"


def held_out_rows(run: RunFiles) -> str | None:
    """What identifies the held-out rows of a run; None where that is not known."""
    found = mapping(run.info.get("data")).get("fingerprint")
    described = mapping(found)
    given = described.get("validation")
    if described.get("kind") == "batches":
        # Batches of an iterable are not identified, but rows with an index beside them are.
        found = given
    elif described.get("kind") in ("arrays", "dataset") and "sha256" not in described:
        return None  # rows that are drawn anew when they are read
    if not found or (given is not None and "sha256" not in mapping(given)):
        return None
    return json.dumps(found, sort_keys=True)


def most_rows(run: RunFiles) -> int | None:
    """How many of the held-out rows a run evaluates; None: all."""
    batches = number(mapping(run.config.get("evaluation")).get("max_batches"))
    size = number(mapping(run.config.get("train")).get("global_batch_size"))
    held_out = _num_held_out(run)
    if batches is None or size is None or (held_out is not None and batches * size >= held_out):
        return None
    return int(batches * size)


def _num_held_out(run: RunFiles) -> float | int | None:
    data = mapping(run.info.get("data"))
    found = number(data.get("num_validation_rows"))
    return number(mapping(data.get("fingerprint")).get("num_validation_rows")) if found is None else found


def other_losses(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    """Say where held-out losses are of different kinds or rows, or may be."""
    tasks = {name: run.task or "unknown" for run, name in zip(runs, names, strict=True)}
    losses = {name: evaluated_loss(run) for run, name in zip(runs, names, strict=True)}
    if len({*tasks.values()}) > 1:
        said = ", ".join(f"{name} {task}" for name, task in tasks.items())
        yield f"The tasks differ ({said}): their losses are of different kinds and cannot be compared."
    elif len({*losses.values()} - {None}) > 1:
        said = "; ".join(f"{name}: {loss or 'not recorded'}" for name, loss in losses.items())
        yield f"The settings of the loss differ ({said}): losses with other settings cannot be compared."
    elif None in losses.values():
        which = " and ".join(name for name, loss in losses.items() if loss is None)
        yield f"The settings of the loss of {which} are not recorded: losses with other settings cannot be compared."
    else:
        yield from _other_rows(runs, names)


def _other_rows(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    rows = {name: held_out_rows(run) for run, name in zip(runs, names, strict=True)}
    most = {name: most_rows(run) for run, name in zip(runs, names, strict=True)}
    unknown = [name for name, run in zip(names, runs, strict=True) if rows[name] is None and "eval_loss" in run.series]
    if len({*rows.values()} - {None}) > 1:
        yield (
            "The data differs between the runs, so that held-out losses are of different rows (and, with another "
            "tokenizer, of different tokens)."
        )
    elif unknown:
        yield f"Which held-out rows {' and '.join(unknown)} evaluated is not recorded: losses may be of different rows."
    elif len({*most.values()}) > 1:
        is_known = all(_num_held_out(run) is not None for run in runs)
        verb, most_of = ("evaluated", "") if is_known else ("may have evaluated", "up to ")
        said = ", ".join(f"{name} {'all' if count is None else f'{most_of}{count:,}'}" for name, count in most.items())
        yield (
            f"The runs {verb} different numbers of held-out rows ({said}), so that their held-out losses cannot be "
            "compared; set the same evaluation.max_batches and train.global_batch_size."
        )
