"""The checkpoints of a run: saved in the background, restored on any mesh, every array verified."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jaxtrain.checkpoint import digest, directory, places, storage, tree
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError, SaveError
from jaxtrain.checkpoint.places import Place, RemotePath, SeenComplete, place_at
from jaxtrain.checkpoint.storage import Storage, everyone, from_process_0, is_process_0
from jaxtrain.checkpoint.upkeep import Retention, Upkeep
from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.terminal import print_remark


class Checkpointer:
    """Saves and restores a train state (any pytree of arrays) in one directory.

    Only one writer may use a directory at a time. In a run of several processes, every process calls every method, in
    the same order; process 0 decides and renames.

    The steps of a directory form one sequence. A save renames the steps that have its number or a higher one to
    `<step>.abandoned-<time>`, and reports them: training went back to an earlier step.

    Args:
        directory: folder of the steps, created by the first save; or gs://bucket/name, s3://bucket/name.
        keep_last: number of the newest steps that are kept, at least 1.
        keep_every: steps at multiples of this are never deleted; None: no such rule.
        keep_best: whether the step with the lowest score, or eval_loss where there are none, is kept.
        read_only: whether this object never writes, renames or deletes.
        report: called with one line when a damaged step is skipped, or steps are renamed.

    Raises:
        ConfigError: the directory is no path and no such address.

    Example:
        >>> with jt.Checkpointer("runs/mine/checkpoints", keep_last=2) as checkpointer:
        ...     saved = checkpointer.save(int(state.step), state, metadata={"note": "first"})
        ...     state = checkpointer.restore(step.abstract_state)  # on this mesh, whatever mesh saved it
        ...     print(saved, checkpointer.latest_step(), checkpointer.metadata())
        True 0 {'note': 'first'}
    """

    def __init__(
        self,
        directory: str | Path | RemotePath,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        read_only: bool = False,
        report: Callable[[str], None] = print_remark,
    ) -> None:
        self.directory = place_at(directory, what="checkpoint directory")
        self._report = report
        self._read_only = read_only
        self._is_closed = self._is_cleared = False
        self._storage: Storage | None = None
        self._saving: Place | None = None
        self._seen = SeenComplete()
        self._retention = Retention(keep_last, keep_every, keep_best)
        self._upkeep = Upkeep(self.directory, self._retention, report)

    def __enter__(self) -> Self:
        self._is_closed = False
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the numbers of the saved steps in ascending order, without one that is still being written."""
        return directory.list_steps(self.directory)

    def latest_step(self) -> int | None:
        """Return the newest saved step, or None."""
        return max(self.steps(), default=None)

    def info(self, step: int | None = None) -> CheckpointInfo:
        """Return the record of a step without its arrays; None means the newest step whose record is intact.

        Raises:
            CheckpointError: there is no such step, or its record is damaged.
        """
        if step is None:
            return self._newest_info()
        steps = self.steps()
        if step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}: it holds {listed}")
        return directory.read_info(self.directory, step)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of a step, as given to `save`; see `info`."""
        return self.info(step).metadata

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, Any],
        eval_loss: float | None = None,
        score: float | None = None,
    ) -> bool:
        """Copy the state and write it in the background.

        When this returns, the buffers of `state` may be donated. The method first waits for a save that is still being
        written.

        Args:
            step: number of the step, 0 or more, as any integer scalar; its directory has this name.
            state: any pytree of arrays and numbers, in any sharding.
            metadata: JSON values that are stored with the step, atomically.
            eval_loss: loss for `keep_best`; None: not evaluated.
            score: what `keep_best` compares in its place, lower being better; None: the loss.

        Returns:
            Whether a save began; False if the step was already saved with the same arrays.

        Raises:
            SaveError: this save or the one before failed; steps that are already saved are kept.
            CheckpointError: the metadata is not JSON, this object is read only, or `close` was called.
        """
        if self._read_only or self._is_closed:
            why = "were opened for reading only" if self._read_only else "are closed: save before close()"
            raise CheckpointError(f"checkpoints in {self.directory} {why}")
        self.settle()
        step = int(step)
        path = self.directory / str(step)
        flat = tree.flatten(state).leaves
        record = {
            "format_version": directory.FORMAT_VERSION,
            "step": step,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": storage.versions(),
            "metadata": dict(metadata),
            "eval_loss": None if eval_loss is None else float(eval_loss),
            "score": None if score is None else float(score),
            "leaves": {name: tree.describe(leaf, name) for name, leaf in flat.items()},
            "key_implementations": tree.key_implementations(flat),
        }
        directory.seal(record)  # metadata that is not JSON fails before any work on the device
        stored = storage.storable(flat)
        record["digests"] = digest.digests(stored)
        if not self._decided(path, lambda: not self._holds(step, record) and self._make_room(step)):
            return False
        with self._failing(path):
            self._open().write(path, stored, directory.seal(record))
        self._saving = path
        self._seen = SeenComplete()
        return True

    def add_eval_loss(self, step: int, eval_loss: float, *, score: float | None = None) -> None:
        """Record the eval_loss (and score) of a step that was saved before it was evaluated, for `keep_best`."""
        self.wait()
        self.info(step)
        if is_process_0():
            marks = float(eval_loss), None if score is None else float(score)
            directory.write_eval_loss(self.directory, step, *marks)
            self._retention.marks[step] = marks

    def restore(self, target: Any, *, step: int | None = None, prefix: str | None = None) -> Any:
        """Read a state directly into the shardings of the target, on any mesh and any number of processes.

        Names, shapes and dtypes are compared with the record before anything is read, and every array is compared with
        its digest afterwards. If the newest step is damaged and `step` is None, its directory is renamed and the step
        before it is used.

        Args:
            target: tree of `jax.ShapeDtypeStruct` with shardings, or of arrays whose shape, dtype and sharding to use.
            step: number of the step; None: the newest step that is intact.
            prefix: path of the target inside the saved tree ("params/blocks"); the rest is not read. None: all of it.

        Returns:
            A tree like the target with the saved arrays, in the target's shardings.

        Raises:
            CheckpointError: there is no such step, it belongs to another model, or no intact step is left.
        """
        self.wait()
        prefix = None if prefix is None else tree.stored_name(prefix)
        wanted = tree.flatten(target, prefix=prefix)
        candidates = [step] if step is not None else list(reversed(self._candidates()))
        damaged: dict[int, str] = {}  # not the errors, which hold the arrays that were read
        for candidate in candidates:
            try:
                restored = self._read(candidate, wanted.leaves, prefix=prefix)
            except DamagedError as error:
                if step is not None:
                    raise
                damaged[candidate] = str(error)
                continue
            # Only once an intact step is found: with all steps renamed, the next run would start at step 0.
            for other, reason in damaged.items() if is_process_0() else ():
                if not self._read_only:
                    moved = directory.set_aside(self.directory, other, reason="corrupt")
                    reason = f"{reason} (renamed to {moved.name})"
                self._report(f"{reason}; step {candidate} is used instead")
            everyone(True)  # what is renamed is so for all of them
            if prefix is None:
                self._upkeep.verified.add(candidate)
            return wanted.rebuild(restored)
        raise CheckpointError(
            f"no intact checkpoint is left in {self.directory} ({len(damaged)} damaged): {next(iter(damaged.values()))}"
            "; restore the files from a copy, or start again in another run directory"
        )

    def read(self, leaves: Mapping[str, Any], *, step: int) -> dict[str, Any]:
        """Read single arrays of a step, each directly into its sharding, and compare each with its digest.

        Args:
            leaves: path ("params/head/kernel") -> `jax.ShapeDtypeStruct` with a sharding, as in `info(step).leaves`.
            step: number of the step.

        Raises:
            CheckpointError: there is no such step, or no such array in it, or it is damaged (DamagedError).
        """
        self.wait()
        info = self.info(step)
        # Parts of a stored name may hold `/`, as labels do.
        names = {path: path if path in info.leaves else tree.stored_name(path) for path in leaves}
        wanted = {names[path]: leaf for path, leaf in leaves.items()}
        self._check_like(info, wanted, names.values())
        read = storage.read_verified(self._open(), info, wanted)
        return {path: read[name] for path, name in names.items()}

    def check_like(self, target: Any) -> None:
        """Compare a tree with the newest intact record, as `restore` does, without reading arrays."""
        self.wait()
        info = self._newest_info()
        self._check_like(info, tree.flatten(target).leaves, info.leaves)

    def verify(self, step: int | None = None) -> CheckpointInfo:
        """Read every array of a step (None: the newest), compare it with its digest, and return the record."""
        self.wait()
        info = self.info(self._candidates()[-1] if step is None else step)
        storage.verify_on_host(info)
        self._upkeep.verified.add(info.step)
        return info

    def wait(self) -> None:
        """Wait until the last save is complete and verified, and older steps are deleted, or raise why not."""
        self.settle()
        self._upkeep.finish()

    def check(self) -> None:
        """Raise a SaveError if a save in the background has failed; cheap enough to call at every step."""
        if self._storage is None or self._saving is None:
            return
        path = self._saving
        with self._failing(path):
            self._storage.check()
        if is_process_0():
            if self._seen(path):
                self._upkeep.begin(int(path.name))
            self._upkeep.look()

    def close(self) -> None:
        """Wait for the last save (see `wait`), then release the threads; `save` is refused afterwards."""
        try:
            self.wait()
            self._is_closed = True
        finally:
            self.release()

    def release(self) -> None:
        """Release the threads of a Checkpointer whose saves are complete."""
        self._upkeep.release()
        opened = self._storage
        self._storage = None
        if opened is not None:
            opened.close()

    def settle(self) -> None:
        """Wait until the last save is complete, as `wait`; it is verified in the background."""
        path = self._saving
        self._saving = None
        if self._storage is None or path is None:
            return
        with self._failing(path):
            self._storage.wait()
        if is_process_0():
            self._upkeep.begin(int(path.name))

    def _open(self) -> Storage:
        self._storage = self._storage or Storage(self.directory)
        return self._storage

    def _candidates(self) -> list[int]:
        steps = self.steps()
        newest = from_process_0(lambda: max(steps, default=-1))
        if newest < 0:
            raise CheckpointError(f"no checkpoint in {self.directory}: check the path, or start with --resume auto")
        return [step for step in steps if step <= newest]

    def _newest_info(self) -> CheckpointInfo:
        candidates = self._candidates()
        for step in reversed(candidates):
            with contextlib.suppress(DamagedError):  # `restore` reports it, and takes the step before
                return self.info(step)
        return self.info(candidates[-1])  # says what is wrong with it

    def _holds(self, step: int, record: Mapping[str, Any]) -> bool:
        """Whether a saved step has the arrays of this record: the same leaves with the same digests."""
        with contextlib.suppress(DamagedError):
            info = directory.read_info(self.directory, step) if step in self.steps() else None
            return info is not None and (info.leaves, info.digests) == (record["leaves"], record["digests"])
        return False

    def _decided(self, path: Place, decide: Callable[[], bool]) -> bool:
        """Return what process 0 decides before a save; every process raises a SaveError where it cannot."""
        failure: SaveError | None = None

        def look() -> int:
            nonlocal failure
            try:
                with self._failing(path):
                    return decide()
            except SaveError as error:
                failure = error
                return -1

        found = from_process_0(look if is_process_0() else lambda: 0)
        if found < 0:
            raise failure or SaveError(f"cannot save checkpoint {path}: process 0 failed")
        return bool(found)

    @contextlib.contextmanager
    def _failing(self, path: Place) -> Iterator[None]:
        """Turn whatever a save raises into a SaveError of one line, and make the directory ready for the next one."""
        try:
            yield
        except Exception as error:
            # Orbax's object keeps the unfinished work of the failed save, so the next save makes another object.
            self._saving = self._storage = None
            self._is_cleared = False
            failure = error
            if not isinstance(error, SaveError):
                failure = SaveError(f"cannot save checkpoint {path}: {storage.free(error)}")
            if is_process_0():
                with contextlib.suppress(OSError, CheckpointError):  # the next save begins with it
                    directory.clear_leftovers(self.directory)
            raise failure from None

    def _make_room(self, step: int) -> bool:
        """Make the directory ready for a save of `step`; process 0 alone."""
        path = self.directory / str(step)
        self._upkeep.forget(step)
        places.make_folder(self.directory)
        if not self._is_cleared:
            directory.clear_leftovers(self.directory)
            self._is_cleared = True
        abandoned = [other for other in self.steps() if other >= step]
        if abandoned:
            self._upkeep.finish()  # no step may be read in the background while it is renamed
        # The newest first: a kill in between leaves the newest of the steps before it.
        for other in reversed(abandoned):
            moved = directory.set_aside(self.directory, other, reason="abandoned")
            self._report(f"step {step} is saved after going back: step {other} is renamed to {moved.name}")
        if path.exists():
            moved = directory.set_aside(self.directory, step, reason="foreign")
            self._report(f"{path} is not a checkpoint of jaxtrain: renamed to {moved.name}")
        return True

    def _read(self, step: int, wanted: Mapping[str, Any], *, prefix: str | None) -> dict[str, Any]:
        info = self.info(step)
        self._check_like(info, wanted, [name for name in info.leaves if tree.is_inside(name, prefix)])
        return storage.read_verified(self._open(), info, wanted)

    def _check_like(self, info: CheckpointInfo, wanted: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raise where the named leaves in the record of a step are not those that are wanted."""
        parts, phrase = tree.difference(
            {name: info.leaves[name] for name in names if name in info.leaves},
            {name: tree.describe(leaf, name) for name, leaf in wanted.items()},
        )
        if not parts:
            return
        what = "model" if parts & {"params", "model_state"} else "optimizer" if "optimizer_state" in parts else "kind"
        if parts <= {"ema", "ema_model_state"}:
            what = "moving average"
        raise CheckpointError(f"checkpoint {info.path} is of another {what}: {phrase}")
