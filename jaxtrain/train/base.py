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
from jaxtrain.checkpoint.run_folder import find_checkpoint
from jaxtrain.errors import CheckpointError
from jaxtrain.models.model import Model, Params
from jaxtrain.precision.kernels import LowRankKernel
from jaxtrain.train.state import TrainState, merge_leaves, paths_of, select_leaves


@dataclass(frozen=True)
class BaseRecord:
    """Where the frozen parameters of a run came from, and what they are.

    Attributes:
        format: "published" (a folder or a GGUF file), "run" (a step of a run), or "drawn" (from the seed alone).
        path: of that; None: there is none.
        seed: of the run; what is not in `path` is drawn from it.
        skip: patterns of paths that are drawn although `path` has them.
        digests: path of each frozen parameter -> its dtype and the two sums of its digest.
        scale: what the products of the adapters above it are multiplied by; None: not recorded.
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

    @property
    def digest(self) -> str:
        """One digest of all frozen parameters."""
        return hashlib.sha256(json.dumps(self.digests, sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The record for run.json and for the metadata of checkpoints."""
        return {
            "path": self.path,
            "digest": self.digest,
            "format": self.format,
            "seed": self.seed,
            "skip": list(self.skip),
            "digests": {path: list(found) for path, found in self.digests.items()},
            "scale": self.scale,
        }

    def check_scale(self, model: Model, *, run_dir: Path) -> None:
        """Raise where a model multiplies the products of the adapters by another number than they were trained with.

        Args:
            model: adapted.
            run_dir: of the run, for messages.

        Raises:
            CheckpointError: names both numbers.
        """
        lora = None if model.adapted is None else model.adapted.lora
        if lora is not None and self.scale is not None and not math.isclose(lora.scale, self.scale, rel_tol=1e-6):
            raise CheckpointError(
                f"the adapters of {run_dir} were trained with products multiplied by {self.scale:g}, and lora.alpha="
                f"{lora.alpha:g} with rank {lora.rank} multiplies by {lora.scale:g}; give alpha, rank and "
                "rank_stabilised of that run"
            )

    def check(self, params: Mapping[str, jax.Array], *, source: str | None, run_dir: Path) -> None:
        """Raise where parameters are not those that the adapters were trained on.

        Args:
            params: path -> frozen parameter.
            source: where they come from.
            run_dir: of the run, for messages.

        Raises:
            CheckpointError: names the first that differs.
        """
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
    skip = tuple(found["skip"])
    return BaseRecord(found["format"], found["path"], found["seed"], skip, sums, found.get("scale"))


def describe_base(
    params: Params,
    trains: Callable[[str], bool],
    *,
    format: str,
    path: str | None,
    seed: int,
    skip: Sequence[str] = (),
) -> BaseRecord:
    """The record of the base of a state; with several processes all of them call this.

    Args:
        params: of the state at step 0, base and adapters.
        trains: parameter path -> whether it is trained.
        format, path, seed, skip: see `BaseRecord`.
    """
    frozen = {name: leaf for name, leaf in paths_of(params).items() if not trains(name)}
    sums = {name: (str(frozen[name].dtype), *found) for name, found in digests(frozen).items()}
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))
    scale = next((leaf.scale for leaf in leaves if isinstance(leaf, LowRankKernel)), None)
    return BaseRecord(format, path, seed, tuple(skip), sums, scale)


def run_of(path: str | Path) -> Path:
    """The directory of the run that a path of a run, of its checkpoints or of one of them belongs to."""
    found = find_checkpoint(path).run_dir
    if found is None:
        raise CheckpointError(
            f"{path} holds adapters, whose base is kept in the directory of their run: give that directory"
        )
    return found


def without_base(state: TrainState, trains: Callable[[str], bool] | None) -> TrainState:
    """The state with None in place of frozen parameters: what a checkpoint of an adapter run holds.

    Args:
        state: arrays, shapes or shardings.
        trains: parameter path -> whether it is trained; None: the checkpoint holds the whole state.
    """
    return state if trains is None else replace(state, params=select_leaves(state.params, trains))


def with_base(state: TrainState, base: Params) -> TrainState:
    """The state with its frozen parameters.

    Args:
        state: from `without_base`.
        base: a tree like its parameters, None in place of trained ones.
    """
    return replace(state, params=merge_leaves(state.params, base))
