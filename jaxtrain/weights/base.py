"""The base of an adapter run: the parameters that it does not train, which its checkpoints name and do not hold."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.digest import digests
from jaxtrain.errors import CheckpointError
from jaxtrain.models.model import Model, Params
from jaxtrain.precision.kernels import LowRankKernel
from jaxtrain.runtime.tree import merge_leaves, paths_of
from jaxtrain.train.state import TrainState, select_leaves


@dataclass(frozen=True)
class BaseRecord:
    """Where the frozen parameters of a run came from, and what they are.

    Attributes:
        format, path: "published" (a folder or a GGUF file), "run" (a step of a run), or "drawn", which has no path.
        seed: of the run; what is not in `path` is drawn from it.
        skip: patterns of paths that are drawn although `path` has them.
        digests: path of each frozen parameter -> its dtype and the two sums of its digest.
        scale: what the products of the adapters above it are multiplied by.
    """

    format: str
    path: str | None
    seed: int
    skip: tuple[str, ...]
    digests: Mapping[str, tuple[str, int, int]] = field(repr=False)
    scale: float | None = None

    @property
    def shown(self) -> str:
        """The base in messages."""
        return f"weights drawn from seed {self.seed}" if self.path is None else self.path

    def as_json(self) -> dict[str, Any]:
        """The record for run.json and for the metadata of checkpoints."""
        digest = hashlib.sha256(json.dumps(self.digests, sort_keys=True).encode()).hexdigest()
        sums = {path: list(found) for path, found in self.digests.items()}
        return vars(self) | {"skip": list(self.skip), "digests": sums, "digest": digest}

    def check_scale(self, model: Model, *, run_dir: str | Path) -> None:
        """Raise a `CheckpointError` where a model's adapters are multiplied by another number than in training."""
        lora = None if model.adapted is None else model.adapted.lora
        if lora is not None and self.scale is not None and not math.isclose(lora.scale, self.scale, rel_tol=1e-6):
            raise CheckpointError(
                f"the adapters of {run_dir} were trained with scale {self.scale:g}, but lora.alpha="
                f"{lora.alpha:g} with rank {lora.rank} gives scale {lora.scale:g}; set alpha, rank and "
                "rank_stabilised as in that run"
            )

    def check(self, params: Mapping[str, jax.Array], *, source: str | None, run_dir: str | Path) -> None:
        """Raise a `CheckpointError` where frozen parameters, by path, are not those of the training."""
        # What was trained there and is frozen here has no digest to compare.
        same = {path: leaf for path, leaf in params.items() if self.digests.get(path, ("",))[0] == str(leaf.dtype)}
        for path, sums in digests(same).items():
            if tuple(sums) != self.digests[path][1:]:
                raise CheckpointError(
                    f"{source or self.shown} is not the base of {run_dir}, which was trained on {self.shown}: {path} "
                    "differs; give that base again"
                )


def base_of(metadata: Mapping[str, Any]) -> BaseRecord | None:
    """The base that the metadata of a checkpoint (or run.json) names; None: it holds all its parameters."""
    found = metadata.get("base")
    if not isinstance(found, Mapping):
        return None
    sums = {path: (dtype, first, second) for path, (dtype, first, second) in found["digests"].items()}
    return BaseRecord(found["format"], found["path"], found["seed"], tuple(found["skip"]), sums, found["scale"])


def describe_base(
    params: Params,
    trains: Callable[[str], bool],
    *,
    format: str,
    path: str | None,
    seed: int,
    skip: Sequence[str] = (),
) -> BaseRecord:
    """The record of the base of a state (`params`, at step 0); with several processes all of them call this."""
    frozen = {name: leaf for name, leaf in paths_of(params).items() if not trains(name)}
    sums = {name: (str(frozen[name].dtype), *found) for name, found in digests(frozen).items()}
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))
    scale = next((leaf.scale for leaf in leaves if isinstance(leaf, LowRankKernel)), None)
    return BaseRecord(format, path, seed, tuple(skip), sums, scale)


def without_base(state: TrainState, trains: Callable[[str], bool] | None) -> TrainState:
    """The state as a checkpoint of an adapter run holds it, without frozen parameters (`trains` None: whole)."""
    return state if trains is None else replace(state, params=select_leaves(state.params, trains))


def with_base(state: TrainState, base: Params) -> TrainState:
    """The state of `without_base` with its frozen parameters, from a tree with None in place of trained ones."""
    return replace(state, params=merge_leaves(state.params, base))
