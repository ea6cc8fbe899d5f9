"""What a classifier gets wrong on held-out rows: which classes it confuses, and the rows of the largest losses.

It is computed once, at the end of a run, for the report; `held_out.json` keeps it, so that the report is drawn again
without the data. Shapes: B batch, C classes, N rows.
"""

import base64
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data import Batches
from jaxtrain.data.evaluated import evaluated_numbers
from jaxtrain.data.rows import selected_rows
from jaxtrain.metrics.media import thumbnail
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.evaluation import most_evaluated
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.train.assemble import Run, reading_threads
from jaxtrain.train.state import TrainState

MOST_ROWS = 2000
# A matrix of more classes cannot be read; the largest confusions are listed in its place.
MOST_CLASSES = 20
_MOST_CONFUSIONS = 40
_MOST_MISTAKES = 8


def held_out_details(run: Run, state: TrainState, step: int, progress: Progress) -> dict[str, Any] | None:
    """JSON values for `held_out.json`; None for other tasks than classification with one class per row.

    Every process of a run takes part. A finished run is not lost over its report: what fails is one line.
    """
    if run.data.validation is None or run.step.task.name != "classification":
        return None
    try:
        with progress.phase("finding mistakes"):
            found = _predictions(run, state)
            if found is None or not len(found["rows"]):
                return None
            return {
                "task": "classification",
                "step": step,
                **_confusions(run, found),
                "mistakes": _mistakes(run, found),
            }
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        progress.message(f"the report has no confusion matrix, because computing it failed: {line}")
        return None


def _predictions(run: Run, state: TrainState) -> dict[str, Any] | None:
    """The prediction of each of some evaluated rows, as NumPy arrays [N]; None where rows have no one class."""
    config, step, validation = run.config, run.step, run.data.validation
    assert validation is not None
    numbers = evaluated_numbers(len(validation), most_evaluated(config))
    numbers = numbers[evaluated_numbers(len(numbers), MOST_ROWS)]
    size, rows = config.train.global_batch_size, selected_rows(validation, numbers)
    batches = Batches(rows, size, seed=config.seed, shuffle=False, workers=reading_threads(config))
    spec = batches.spec()
    targets = spec.get("targets")
    if "inputs" not in spec or targets is None or targets.ndim != 1 or not jnp.issubdtype(targets.dtype, jnp.integer):
        return None
    # Replicated, so that each process can read all of it.
    forward = jax.jit(
        lambda params, model_state, batch: _logits(run, params, model_state, batch),
        out_shardings=NamedSharding(step.mesh, PartitionSpec()),
        compiler_options={**step.compiler_options.used} or None,
    )
    load = step.loader(batches)
    found = [
        jax.device_get(forward(state.evaluation_params, state.evaluation_model_state, load(k)))
        for k in range(len(batches))
    ]
    if found[0][0] is None:
        return None
    logits, targets, weights = (np.concatenate(part) for part in zip(*found, strict=True))
    # Rows that fill the last batch up weigh nothing, and a negative target is ignored everywhere.
    (rows_N,) = np.nonzero((weights != 0) & (targets >= 0))
    logits_NC, targets_N = logits[rows_N], targets[rows_N]
    log_probabilities_NC = logits_NC - np.logaddexp.reduce(logits_NC, axis=-1, keepdims=True)
    predicted_N, index_N = logits_NC.argmax(-1), np.arange(len(rows_N))
    return {
        "rows": numbers[rows_N],
        "targets": targets_N,
        "predicted": predicted_N,
        "losses": -log_probabilities_NC[index_N, targets_N],
        "confidence": np.exp(log_probabilities_NC[index_N, predicted_N]),
        "weights": weights[rows_N],
        "num_classes": logits.shape[-1],
        "num_rows": len(validation),
        "read": len(numbers),
    }


def _logits(run: Run, params: Any, model_state: Any, batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Logits [B, C] float32, targets and weights [B] of a batch; None in place of outputs of another shape."""
    model = run.step.sharded_model
    with model.context():
        logits_BC, _ = model.apply(params, model_state, batch["inputs"], key=None, train=False)
    is_table = isinstance(logits_BC, jax.Array) and logits_BC.ndim == 2
    return logits_BC.astype(jnp.float32) if is_table else None, batch["targets"], batch["weights"]


def _confusions(run: Run, found: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of (target, predicted), all of them where the classes are few, else the most frequent confusions."""
    targets, predicted = found["targets"], found["predicted"]
    num_classes = found["num_classes"]
    pairs, counts = np.unique(np.stack([targets, predicted]), axis=1, return_counts=True)
    cells = [(int(target), int(guess), int(count)) for (target, guess), count in zip(pairs.T, counts, strict=True)]
    confused = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    names = (run.data.reading or {}).get("classes")
    return {
        "rows": len(targets),
        "read": found["read"],
        "has_weights": bool((found["weights"] != found["weights"][0]).any()),
        "of_rows": found["num_rows"],
        "right": int((targets == predicted).sum()),
        "num_classes": num_classes,
        "classes": [str(name) for name in names] if names is not None and len(names) == num_classes else None,
        "matrix": cells if num_classes <= MOST_CLASSES else None,
        "confusions": confused[:_MOST_CONFUSIONS],
    }


def _mistakes(run: Run, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The wrong rows of the largest losses, with a picture where inputs are images; the main process reads them."""
    wrong = np.flatnonzero(found["targets"] != found["predicted"])
    losses = np.nan_to_num(found["losses"][wrong], nan=np.inf)
    worst = wrong[np.argsort(-losses, kind="stable")[:_MOST_MISTAKES]]
    return [
        {
            "row": int(found["rows"][index]),
            "target": int(found["targets"][index]),
            "predicted": int(found["predicted"][index]),
            "loss": float(found["losses"][index]),
            "confidence": float(found["confidence"][index]),
            "picture": _picture(run, int(found["rows"][index])),
        }
        for index in (worst if is_main_process() else ())
    ]


def _picture(run: Run, row: int) -> str | None:
    if run.data.validation is None or len(run.data.input_shape) not in (2, 3):
        return None
    found: Any = run.data.validation[row]
    picture = thumbnail(np.asarray(found["inputs"]))
    return None if picture is None else base64.b64encode(picture).decode("ascii")
