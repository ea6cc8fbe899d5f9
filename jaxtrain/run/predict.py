"""Outputs of a model for any number of rows: in batches that are filled up to divide by the mesh, and cut again."""

import functools
from collections.abc import Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data import Batches, Data
from jaxtrain.data.masked import check_unmasked
from jaxtrain.data.rows import ArrayRows
from jaxtrain.errors import DataError, UserError
from jaxtrain.models.model import ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.parallel.division import batch_shards
from jaxtrain.run.opened_data import check_read_alike
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.train.batch import batch_shardings
from jaxtrain.train.checks import check_ids


class Predictor:
    """Applies a model to rows, in evaluation mode.

    Args:
        sharded_model: the model on its mesh.
        batch_axes: see `Task.batch_axes`.
        trained_on: the entry `data` of the run's `run.json`.
        compiler_options: over those of `jaxtrain/runtime/compiler.py`.
    """

    def __init__(
        self,
        sharded_model: ShardedModel,
        *,
        batch_axes: Mapping[str, tuple[str | None, ...]],
        trained_on: Mapping[str, Any],
        compiler_options: Mapping[str, Value] | None = None,
    ) -> None:
        self._sharded_model, self._batch_axes, self._trained_on = sharded_model, batch_axes, trained_on
        shape = trained_on.get("input_shape")
        # A row of the data may be a pair, and a row of the model is one of the two.
        has_pairs = batch_axes.get("inputs") == ("batch", None, "sequence")
        self._input_shape = shape[1:] if shape and has_pairs else shape
        mesh = sharded_model.mesh
        options = choose_options(mesh.devices.flat[0], mesh.size, compiler_options)
        # Replicated, so that every process has all rows.
        replicated = NamedSharding(mesh, PartitionSpec())
        self._jitted = jax.jit(self._apply, out_shardings=replicated, compiler_options={**options.used} or None)

    def __call__(
        self, params: Params, model_state: ModelState, inputs: Any, *, batch_size: int, scaled: bool = False
    ) -> Any:
        """Outputs of all rows.

        Args:
            params, model_state: in the shardings of the model.
            inputs: see `OpenedRun.predict`.
            batch_size: the largest batch; rounded up to divide by the mesh.
            scaled: see `OpenedRun.predict`.

        Returns:
            NumPy arrays [rows, ...] in the structure of the model's outputs; floats are float32. Entries without one
            value per row are left out.

        Raises:
            DataError: rows that the model does not take.
        """
        rows = self._rows(inputs, scaled=scaled)
        size = self._batch_size(len(rows), batch_size)
        batches = Batches(rows, size, seed=0, shuffle=False)
        spec = batches.spec()
        if "inputs" not in spec:
            raise DataError(f"the rows hold {', '.join(spec)}; predict reads their entry 'inputs'")
        by_row = self._by_row(params, model_state, spec["inputs"])
        shardings = batch_shardings(spec, self._sharded_model.layout, self._batch_axes, {})
        vocab_size = self._sharded_model.model.vocab_size
        limits = {} if vocab_size is None else {"inputs": vocab_size}
        check = functools.partial(check_ids, limits=limits, where="predict")
        structure, found = jax.tree.structure(by_row), []
        for k in range(len(batches)):
            batch = batches.load(k, shardings, check=check)
            outputs = structure.flatten_up_to(self._jitted(params, model_state, batch["inputs"]))
            kept = [leaf for leaf, keep in zip(outputs, jax.tree.leaves(by_row), strict=True) if keep]
            found.append([leaf[: len(rows) - k * size] for leaf in jax.device_get(kept)])
        columns = iter([np.concatenate(parts) for parts in zip(*found, strict=True)])
        return _kept(by_row, columns)

    def _apply(self, params: Params, model_state: ModelState, inputs: Any) -> Any:
        sharded_model = self._sharded_model
        with sharded_model.context():
            outputs, _ = sharded_model.apply(params, model_state, inputs, key=None, train=False)
        # NumPy has no bfloat16 of its own.
        return jax.tree.map(lambda leaf: _plain_float(jnp.asarray(leaf)), outputs)

    def _rows(self, inputs: Any, *, scaled: bool) -> grain.MapDataset:
        """The inputs as rows with an index, arrays in the form that the model was trained on."""
        if isinstance(inputs, Data):
            if inputs.validation is not None:
                raise DataError(
                    "predict takes rows, and this Data has two sets; write run.predict(data.validation), or data.train"
                )
            check_read_alike(inputs, {"data": self._trained_on})
            inputs = inputs.train
        if isinstance(inputs, grain.MapDataset):
            return inputs
        arrays = jax.tree.map(_as_array, inputs, is_leaf=lambda leaf: isinstance(leaf, list))
        leaves = jax.tree.leaves(arrays)
        # bfloat16 is of the kind of raw bytes, which are what a .npy file of it holds.
        if not leaves or any(leaf.dtype.kind not in "biufV" or leaf.dtype.type is np.void for leaf in leaves):
            shown = f"{leaves[0].dtype} values" if leaves else "nothing"
            raise DataError(
                f"predict takes an array [rows, ...] or a tree of them, not {shown}; "
                "write run.predict(np.asarray(rows, np.float32))"
            )
        if isinstance(arrays, np.ndarray):
            arrays = self._encoded(arrays, scaled=scaled)
        return ArrayRows({"inputs": arrays})

    def _encoded(self, inputs: np.ndarray, *, scaled: bool) -> np.ndarray:
        """One array of inputs as the run's data gave it to the model.

        Raises:
            DataError: a single row, floats in place of ids, or other columns than those of the run's table.
        """
        shape, dtype = self._input_shape, self._trained_on.get("input_dtype")
        rows = _shown([None, *(["..."] if shape is None else shape)])
        if list(inputs.shape) == shape or not inputs.ndim:
            raise DataError(f"predict takes rows {rows}, not a single one {list(inputs.shape)}; write inputs[None]")
        reading = self._trained_on.get("reading") or {}
        if reading.get("kind") == "table" and not scaled:
            from jaxtrain.data.sources.tables import scaled_like

            if inputs.ndim != 2:
                raise DataError(f"predict takes rows {rows} of a table, not {list(inputs.shape)}; reshape them")
            return scaled_like(reading, inputs, label="the array")
        if reading.get("kind") in ("image_folder", "images") and inputs.dtype == np.uint8 and inputs.shape[-1:] == (3,):
            from jaxtrain.data.sources.images import normalized

            return normalized(inputs)
        decoder = self._sharded_model.model.decoder
        if decoder is not None and inputs.ndim > 1 and inputs.shape[1] > decoder.max_length:
            raise DataError(
                f"predict was given {inputs.shape[1]} tokens per row, the model has {decoder.max_length} positions; "
                f"write inputs[:, :{decoder.max_length}]"
            )
        if dtype is None:
            return inputs
        wanted = np.dtype(dtype)
        if wanted.kind in "iu" and inputs.dtype.kind not in "iub":
            raise DataError(
                f"predict was given {inputs.dtype}, the run was trained on {dtype}; write inputs.astype('{dtype}')"
            )
        return inputs if wanted.kind in "iu" else inputs.astype(wanted, copy=False)

    def _batch_size(self, num_rows: int, largest: int) -> int:
        """Rows of a batch: few different numbers, since each is compiled for, and all divide by the mesh."""
        layout = self._sharded_model.layout
        shards = batch_shards(layout.mesh.shape, layout.rules["batch"])
        size = shards
        while size < min(num_rows, largest):
            size *= 2
        return min(size, -(-largest // shards) * shards)

    def _by_row(self, params: Params, model_state: ModelState, spec: Any) -> Any:
        """The structure of the outputs, with whether each entry has one value per row.

        Raises:
            DataError: the model cannot be applied to such rows.
        """

        def outputs(factor: int) -> Any:
            inputs = jax.tree.map(
                lambda one: jax.ShapeDtypeStruct((factor * one.shape[0], *one.shape[1:]), one.dtype), spec
            )
            return jax.eval_shape(self._apply, params, model_state, inputs)

        try:
            once = outputs(1)
            # A dimension may have the size of the batch by chance; twice the rows tell.
            twice = outputs(2)
        except UserError as error:
            # A sharded model names the inputs that its model fails on; the run knows those that it was trained on.
            if not isinstance(error.__cause__, Exception):
                raise
            raise DataError(self._misfit(spec, error.__cause__)) from None
        except Exception as error:
            raise DataError(self._misfit(spec, error)) from None
        return jax.tree.map(lambda one, two: one.shape[:1] != two.shape[:1], once, twice)

    def _misfit(self, spec: Any, error: Exception) -> str:
        leaves = jax.tree.leaves(spec)
        given = ", ".join(f"{_shown([None, *leaf.shape[1:]])} {leaf.dtype}" for leaf in leaves)
        shape, dtype = self._input_shape, self._trained_on.get("input_dtype")
        wanted = "" if shape is None or dtype is None else f"; the run was trained on {_shown([None, *shape])} {dtype}"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"inputs {given} do not fit the model {self._sharded_model.model.name}{wanted} ({reason})"


def _as_array(leaf: Any) -> np.ndarray:
    check_unmasked(leaf, "predict was given an array")
    try:
        return np.asarray(leaf)
    except ValueError:
        raise DataError("predict was given lists of different lengths; pad or crop the rows to one length") from None


def _with_rows(leaf: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)


def _plain_float(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _shown(shape: list[Any]) -> str:
    """A shape with `rows` in place of None: [rows, 8, 8]."""
    return f"[{', '.join('rows' if size is None else str(size) for size in shape)}]"


def _kept(by_row: Any, columns: Any) -> Any:
    """The outputs with a column for each entry by row; mappings lose their other entries."""
    if isinstance(by_row, Mapping):
        parts = {name: _kept(value, columns) for name, value in sorted(by_row.items())}
        return {name: part for name, part in parts.items() if part is not None}
    return jax.tree.map(lambda keep: next(columns) if keep else None, by_row)
