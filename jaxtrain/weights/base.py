"""The base of an adapter run: the parameters that it does not train, which its checkpoints name and do not hold."""

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
        format: "published" (a folder or a GGUF file), "run" (a step of a run), or "drawn".
        path: of the folder, file or step; None: drawn.
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
    def text(self) -> str:
        """The base in messages."""
        return f"weights drawn from seed {self.seed}" if self.path is None else self.path

    def as_json(self) -> dict[str, Any]:
        """Return the record for run.json and for the metadata of checkpoints, which `base_of` reads."""
        return vars(self)

    def check_scale(self, model: Model, *, run_dir: str | Path) -> None:
        """Raise a `CheckpointError` where a model's adapters are multiplied by another number than in training."""
        lora = None if model.adapted is None else model.adapted.lora
        if lora is None or self.scale is None or math.isclose(lora.scale, self.scale, rel_tol=1e-6):
            return
        raise CheckpointError(
            f"the adapters of {run_dir} were trained with scale {self.scale:g}, but lora.alpha={lora.alpha:g} with "
            f"rank {lora.rank} gives scale {lora.scale:g}; set alpha, rank and rank_stabilised as in that run"
        )

    def check(self, params: Mapping[str, jax.Array], *, source: str | None, run_dir: str | Path) -> None:
        """Raise a `CheckpointError` where frozen parameters, by path, are not those of the training.

        Parameters without a digest in their dtype are not compared: they were trained there.
        """
        comparable = {}
        for path, leaf in params.items():
            if path in self.digests and self.digests[path][0] == str(leaf.dtype):
                comparable[path] = leaf
        for path, sums in digests(comparable).items():
            if tuple(sums) != self.digests[path][1:]:
                raise CheckpointError(
                    f"{source or self.text} is not the base of {run_dir}, which was trained on {self.text}: {path} "
                    "differs; give that base again"
                )


def base_of(metadata: Mapping[str, Any]) -> BaseRecord | None:
    """Return the base that the metadata of a checkpoint (or run.json) names; None: it holds all its parameters."""
    record = metadata.get("base")
    if record is None:
        return None
    return BaseRecord(
        format=record["format"],
        path=record["path"],
        seed=record["seed"],
        skip=tuple(record["skip"]),
        digests={path: tuple(digest) for path, digest in record["digests"].items()},
        scale=record["scale"],
    )


def describe_base(
    params: Params,
    trains: Callable[[str], bool],
    *,
    format: str,
    path: str | None,
    seed: int,
    skip: Sequence[str] = (),
) -> BaseRecord:
    """Return the record of the base of a state (`params`, at step 0); with several processes all of them call this."""
    frozen = {name: leaf for name, leaf in paths_of(params).items() if not trains(name)}
    sums = {name: (str(frozen[name].dtype), *digest) for name, digest in digests(frozen).items()}
    scale = None
    for leaf in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel)):
        if isinstance(leaf, LowRankKernel):
            scale = leaf.scale
    return BaseRecord(format, path, seed, tuple(skip), sums, scale)


def without_base(state: TrainState, trains: Callable[[str], bool] | None) -> TrainState:
    """Return the state as a checkpoint of an adapter run holds it, without frozen parameters (`trains` None: all)."""
    return state if trains is None else replace(state, params=select_leaves(state.params, trains))


def with_base(state: TrainState, base: Params) -> TrainState:
    """Return the state of `without_base` with its frozen parameters, a tree with None in place of trained ones."""
    return replace(state, params=merge_leaves(state.params, base))
