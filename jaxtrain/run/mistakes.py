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
from jaxtrain.metrics.media import thumbnail
from jaxtrain.metrics.progress import Progress
from jaxtrain.run.compared import most_evaluated
from jaxtrain.runtime.distributed import is_main_process
from jaxtrain.train.assemble import Run, reading_threads
from jaxtrain.train.state import TrainState

MOST_ROWS = 2000
# A matrix of more classes cannot be read; the largest confusions are listed in its place.
MOST_CLASSES = 20
_MOST_CONFUSIONS = 40
_MOST_MISTAKES = 8


def held_out_details(run: Run, state: TrainState, step: int, progress: Progress) -> dict[str, Any] | None:
    """Compute what the report shows of single held-out rows. Every process of a run takes part.

    Args:
        run: what was trained.
        state: the last state; its evaluation parameters are used.
        step: number of the last step.
        progress: shows the phase, and one line where it fails: a finished run is not lost over its report.

    Returns:
        JSON values for `held_out.json`; None for other tasks than classification with one class per row, and where
        the run has no held-out rows.
    """
    validation = run.data.validation
    if validation is None or run.step.task.name != "classification":
        return None
    try:
        with progress.phase("finding mistakes"):
            found = _predictions(run, state)
            if found is None or not len(found["rows"]):
                return None
            confusions, mistakes = _confusions(run, found), _mistakes(run, found)
        return {"task": "classification", "step": step, **confusions, "mistakes": mistakes}
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        progress.message(f"the report has no confusion matrix, because computing it failed: {line}")
        return None


def _predictions(run: Run, state: TrainState) -> dict[str, Any] | None:
    """The prediction of each of some evaluated rows, as NumPy arrays [N]; None where rows have no one class."""
    config, step = run.config, run.step
    assert run.data.validation is not None
    from jaxtrain.data.rows import selected_rows

    num_rows = len(run.data.validation)
    numbers = evaluated_numbers(num_rows, most_evaluated(config))
    numbers = numbers[evaluated_numbers(len(numbers), MOST_ROWS)]
    batches = Batches(
        selected_rows(run.data.validation, numbers),
        config.train.global_batch_size,
        seed=config.seed,
        shuffle=False,
        workers=reading_threads(config),
    )
    spec = batches.spec()
    targets, inputs = spec.get("targets"), spec.get("inputs")
    if inputs is None or targets is None or targets.ndim != 1 or not jnp.issubdtype(targets.dtype, jnp.integer):
        return None
    size = config.train.global_batch_size
    # Replicated, so that each process can read all of it.
    predict = jax.jit(
        lambda params, model_state, batch: _predict(run, params, model_state, batch),
        out_shardings=NamedSharding(step.mesh, PartitionSpec()),
        compiler_options={**step.compiler_options.used} or None,
    )
    load = step.loader(batches)
    parts: list[dict[str, np.ndarray]] = []
    num_classes = 0
    for k in range(len(batches)):
        found = predict(state.evaluation_params, state.evaluation_model_state, load(k))
        if found is None:
            return None
        part = jax.device_get(found)
        num_classes = int(part.pop("num_classes"))
        parts.append({**part, "rows": k * size + np.arange(size)})
    counts = np.concatenate([part.pop("counts") for part in parts])
    table = {name: np.concatenate([part[name] for part in parts])[counts] for name in parts[0]}
    table["rows"] = numbers[table["rows"]]
    return {**table, "num_classes": num_classes, "num_rows": num_rows, "read": len(numbers)}


def _predict(run: Run, params: Any, model_state: Any, batch: Mapping[str, Any]) -> dict[str, jax.Array] | None:
    """Class, loss and probabilities of each row of a batch; None where the model does not give logits [B, C]."""
    model = run.step.sharded_model
    with model.context():
        logits_BC, _ = model.apply(params, model_state, batch["inputs"], key=None, train=False)
    if not isinstance(logits_BC, jax.Array) or logits_BC.ndim != 2:
        return None
    targets_B = batch["targets"].astype(jnp.int32)
    log_probabilities_BC = jax.nn.log_softmax(logits_BC.astype(jnp.float32))
    predicted_B = jnp.argmax(logits_BC, axis=-1).astype(jnp.int32)

    def of(classes_B: jax.Array) -> jax.Array:
        return jnp.take_along_axis(log_probabilities_BC, jnp.maximum(classes_B, 0)[:, None], axis=-1)[:, 0]

    return {
        "targets": targets_B,
        "predicted": predicted_B,
        "losses": -of(targets_B),
        "confidence": jnp.exp(of(predicted_B)),
        # Rows that fill the last batch up weigh nothing, and a negative target is ignored everywhere.
        "counts": (batch["weights"] != 0) & (targets_B >= 0),
        "weights": batch["weights"].astype(jnp.float32),
        "num_classes": jnp.int32(logits_BC.shape[-1]),
    }


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
    mistakes = []
    for index in worst if is_main_process() else ():
        row = int(found["rows"][index])
        picture = _picture(run, row)
        mistakes.append(
            {
                "row": row,
                "target": int(found["targets"][index]),
                "predicted": int(found["predicted"][index]),
                "loss": float(found["losses"][index]),
                "confidence": float(found["confidence"][index]),
                "picture": None if picture is None else base64.b64encode(picture).decode("ascii"),
            }
        )
    return mistakes


def _picture(run: Run, row: int) -> bytes | None:
    validation = run.data.validation
    if validation is None or len(run.data.input_shape) not in (2, 3):
        return None
    try:
        found: Any = validation[row]
        return thumbnail(np.asarray(found["inputs"]))
    except Exception:
        # Rows of a user's own source may be of any kind; the matrix is worth showing without its pictures.
        return None
