"""The checkpoints of a run: saved in the background, restored on any mesh, every array verified."""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxtrain.checkpoint import arrays, checks, directory, places, tree
from jaxtrain.checkpoint.directory import CheckpointInfo, DamagedError
from jaxtrain.checkpoint.failures import save_error, store_failure, store_failures
from jaxtrain.checkpoint.line import StepLine
from jaxtrain.checkpoint.places import Place, RemotePath
from jaxtrain.checkpoint.space import SaveError, check_space
from jaxtrain.checkpoint.storage import Storage
from jaxtrain.checkpoint.upkeep import Upkeep
from jaxtrain.errors import CheckpointError
from jaxtrain.runtime.terminal import print_remark


class Checkpointer:
    """Saves and restores a train state (any pytree of arrays) in one directory.

    Only one writer may use a directory at a time. In a run of several processes, every process calls every method, in
    the same order; process 0 decides and renames.

    The steps of a directory form one sequence. A save goes back when it follows the restore of an earlier step, or when
    its number is not above the newest step: the later steps are abandoned, moved to `abandoned-<time>` once the save is
    complete, and reported. Restoring alone moves nothing.

    Args:
        directory: folder of the steps, created by the first save; or gs://bucket/name, s3://bucket/name.
        keep_last: number of the newest steps that are kept.
        keep_every: steps at multiples of this are never deleted; None: no such rule.
        keep_best: whether the step with the lowest score, or eval_loss where there are none, is kept.
        read_only: whether this object never writes, renames or deletes.
        mirror: folder of second copies of the steps, used where the first ones are gone or damaged; None: no copies.
        report: called with one line when a damaged step is skipped, or steps are abandoned.

    Raises:
        ConfigError: the directory is a file, `keep_last` or `keep_every` is not an integer of at least 1, or the mirror
            holds the copies of another directory.

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
        mirror: str | Path | RemotePath | None = None,
        report: Callable[[str], None] = print_remark,
    ) -> None:
        self.directory = checks.checked_directory(directory)
        last, every = checks.checked_counts(keep_last=keep_last, keep_every=keep_every)
        self._line = StepLine(self.directory, keep_last=last, keep_every=every, keep_best=keep_best, report=report)
        self._read_only, self._is_begun, self._is_closed = read_only, False, False
        self._storage: Storage | None = None
        self._saving: Place | None = None
        second = None if mirror is None or read_only else places.absolute_place(mirror, what="checkpoint mirror")
        self._upkeep = Upkeep(self.directory, self._line, mirror=second, report=report)

    def __enter__(self) -> Self:
        self._is_closed = False
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the numbers of the saved steps in ascending order, without one that is still being written."""
        steps = self._line.steps()
        if not steps and not self._read_only and self._saving is None and arrays.is_process_0():
            # A kill while the only step was being replaced left that step in the directory of abandoned ones.
            self._line.settle()
            if not self._line.steps() and not self._is_begun:
                self._upkeep.recover()
            steps = self._line.steps()
        return steps

    def begin_anew(self) -> None:
        """Begin a line of steps that the mirror knows nothing of: the copies that it holds are moved aside there."""
        self._is_begun = True
        if arrays.is_process_0():
            self._upkeep.set_mirror_aside()

    def latest_step(self) -> int | None:
        """Return the newest saved step, or None."""
        return max(self.steps(), default=None)

    def info(self, step: int) -> CheckpointInfo:
        """Return the record of a step without reading its arrays.

        Raises:
            CheckpointError: there is no such step, or its record is damaged.
        """
        if step not in self.steps():
            raise CheckpointError(
                f"no checkpoint of step {step!r} in {self.directory}: it holds {self._line.listing()}"
            )
        return directory.read_info(self.directory, step)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Return the metadata of a step, as given to `save`; None means the newest step whose record is intact."""
        return self._line.newest_metadata(self._candidates()) if step is None else self.info(step).metadata

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
        written. A save under the number of a saved step with other arrays goes back: the earlier step is abandoned.

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
            CheckpointError: an argument has a wrong type, an array of the state is deleted, or `close` was called.
        """
        step, metadata = checks.checked_step(step), checks.checked_metadata(metadata)
        eval_loss, score = checks.checked_loss(eval_loss), checks.checked_loss(score, name="score")
        checks.check_writable(self.directory, read_only=self._read_only, is_closed=self._is_closed)
        self.settle()
        self._is_begun = True
        path = directory.step_path(self.directory, step)
        flat = tree.flatten(state).leaves
        checks.check_not_empty(state, flat)
        checks.check_deleted(path, flat)
        record = arrays.step_record(step, flat, metadata=metadata, eval_loss=eval_loss, score=score)
        directory.seal(record)  # metadata that is not JSON fails before any work on the device
        stored = arrays.storable(flat)
        if arrays.decided(path, lambda: step in self.steps()):
            record["digests"] = arrays.digests(stored)
            if arrays.decided(path, lambda: self._line.holds(step, record)):
                self._line.position = step
                return False
        try:
            self._prepare(path, sum(array.nbytes for array in stored.values()))
            record["digests"] = record.get("digests") or arrays.digests(stored)
            self._open().write(path, stored, directory.seal(record))
        except CheckpointError:
            raise
        except Exception as error:
            raise self._failed(path, error) from None
        self._saving = path
        return True

    def add_eval_loss(self, step: int, eval_loss: float, *, score: float | None = None) -> None:
        """Record the eval_loss (and score) of a step that was saved before it was evaluated, for `keep_best`.

        Raises:
            CheckpointError: the loss is no number, or there is no such step.
        """
        found = checks.checked_loss(eval_loss)
        self.wait()
        self.info(step)
        if arrays.is_process_0():
            self._line.note_loss(step, math.nan if found is None else found, None if score is None else float(score))

    def score_again(self, scores: Mapping[int, float | None], *, after: int = 0) -> None:
        """Compare steps saved earlier by these scores (lower is better) for `keep_best`, not by those in their records.

        Args:
            scores: step -> score; a step without one has only its eval_loss, which counts where no step has a score.
            after: steps up to this one, evaluated on other rows, are compared only until a later one has a loss.

        Raises:
            CheckpointError: the scores are no dict of numbers.
        """
        self.wait()
        self._line.score_again(checks.checked_scores(scores), after=checks.checked_step(after))

    def restore(self, target: Any, *, step: int | None = None, prefix: str | None = None) -> Any:
        """Read a state directly into the shardings of the target, on any mesh and any number of processes.

        Names, shapes and dtypes are compared with the record before anything is read, and every array is compared with
        its digest afterwards. If the newest step is damaged and `step` is None, its directory is renamed and its copy
        or the step before it is used. After a complete state was restored, the next save starts a new line from it:
        once that save is complete, later steps are moved aside. To read an earlier step during training, use a second
        Checkpointer with `read_only=True`.

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
        checks.check_target(target)
        candidates = [step] if step is not None else list(reversed(self._candidates()))
        damaged: list[tuple[int, str]] = []  # not the errors, which hold the arrays that were read
        for candidate in candidates:
            try:
                restored = self._read(candidate, wanted.leaves, prefix=prefix)
            except DamagedError as error:
                if step is not None:
                    raise
                damaged.append((candidate, str(error)))
                if not self._read_only and candidate == candidates[-1]:
                    other = arrays.from_process_0(lambda: self._upkeep.recover(damaged=dict(damaged)))
                    candidates += [other] if other >= 0 else []
                continue
            # Only once an intact step is found: with all steps renamed, the next run would start at step 0.
            if arrays.is_process_0():
                self._line.pass_over(damaged, instead=candidate, rename=not self._read_only)
            arrays.barrier("jaxtrain_set_aside")
            if prefix is None:
                self._line.stand_at(candidate)
                self._upkeep.restored(candidate)
            return wanted.rebuild(restored)
        raise checks.none_left(self.directory, damaged)

    def read(self, leaves: Mapping[str, Any], *, step: int) -> dict[str, Any]:
        """Read single arrays of a step, each directly into its sharding, and compare each with its digest.

        Args:
            leaves: path ("params/head/kernel") -> `jax.ShapeDtypeStruct` with a sharding, as in `info(step).leaves`.
            step: number of the step.

        Returns:
            Path -> array.

        Raises:
            DamagedError: a file is missing, or an array differs from what was saved.
            CheckpointError: no dict of arrays, or there is no such step, or no such array in it.
        """
        self.wait()
        info = self.info(step)
        names = {path: tree.name_among(info.leaves, path) for path in leaves}
        checks.check_leaves(info, wanted := {names[path]: leaf for path, leaf in leaves.items()})
        read = arrays.read_verified(self._open(), info, wanted)
        return {path: read[name] for path, name in names.items()}

    def check_like(self, target: Any) -> None:
        """Compare names, shapes and dtypes with the newest intact record, as `restore` does, without reading arrays.

        Args:
            target: tree of `jax.ShapeDtypeStruct` or arrays.

        Raises:
            CheckpointError: there is no step, or it belongs to another model or optimizer.
        """
        self.wait()
        for candidate in reversed(self._candidates()):
            with contextlib.suppress(DamagedError):  # `restore` reports it, and takes the step before
                checks.check_like(self.info(candidate), tree.flatten(target).leaves, None)
                return

    def verify(self, step: int | None = None) -> CheckpointInfo:
        """Read every array of a step, one at a time, and compare it with its digest.

        Args:
            step: number of the step; None: the newest step.

        Returns:
            The record of the step.

        Raises:
            DamagedError: an array differs from what was saved; the message names the first one.
            CheckpointError: there is no such step.
        """
        self.wait()
        info = self.info(self._candidates()[-1] if step is None else step)
        for name, entry in info.leaves.items():
            arrays.read_verified(self._open(), info, {name: arrays.on_one_device(entry, info, name)})
        self._upkeep.restored(info.step)
        return info

    def wait(self) -> None:
        """Wait until the last save is complete, verified and copied, then delete the steps that the rules do not keep.

        Raises:
            SaveError: that save failed, or reads otherwise than it was written.
        """
        self.settle()
        if not self._read_only and arrays.is_process_0():
            self._upkeep.finish()

    def check(self) -> None:
        """Raise a SaveError if a save in the background has failed; cheap enough to call at every step."""
        if self._storage is None or self._saving is None:
            return
        try:
            self._storage.check()
        except Exception as error:
            path, self._saving = self._saving, None
            raise self._failed(path, error) from None
        if arrays.is_process_0():
            self._upkeep.watch(self._saving)

    def close(self) -> None:
        """Wait for the last save (see `wait`), then release the threads; `save` is refused afterwards."""
        try:
            self.wait()
            self._is_closed = True
        finally:
            self.release()

    def release(self) -> None:
        """Release the threads of a Checkpointer whose saves are complete."""
        opened, self._storage = self._storage, None
        if opened is not None:
            opened.close()

    def settle(self) -> None:
        """Wait until the last save is complete, as `wait`; it is verified and copied in the background."""
        path, self._saving = self._saving, None
        if self._storage is None or path is None:
            return
        try:
            self._storage.wait()
        except Exception as error:
            raise self._failed(path, error) from None
        self._line.position = int(path.name)
        if arrays.is_process_0():
            with store_failures(path):
                self._line.settle()
                self._upkeep.begin(int(path.name))
                self._upkeep.prune()

    def _open(self) -> Storage:
        self._storage = self._storage or Storage(self.directory)
        return self._storage

    def _candidates(self) -> list[int]:
        steps = self.steps()
        newest = arrays.from_process_0(lambda: max(steps, default=-1))
        if newest < 0:
            raise CheckpointError(f"no checkpoint in {self.directory}: check the path, or start with --resume auto")
        return [step for step in steps if step <= newest]

    def _prepare(self, path: Place, array_bytes: int) -> None:
        failure: Exception | None = None
        if arrays.is_process_0():
            try:
                self._upkeep.forget(int(path.name))
                self._line.make_room(int(path.name), before_moving=self._upkeep.pause)
                check_space(self.directory, array_bytes, what=f"cannot save checkpoint {path}")
            except (OSError, CheckpointError) as error:
                failure = store_failure(path, error)
        # Otherwise the other processes would wait in the save for one that has failed.
        if not arrays.everyone(failure is None):
            raise failure or SaveError(f"cannot save checkpoint {path}: process 0 cannot write there")

    def _failed(self, path: Place, error: BaseException) -> CheckpointError:
        # Orbax's object keeps the unfinished work of the failed save, so the next save makes another object.
        self._storage = None
        if arrays.is_process_0():
            self._line.clear()
        return save_error(path, error)

    def _read(self, step: int, wanted: Mapping[str, Any], *, prefix: str | None) -> dict[str, Any]:
        """Read a step, from its copy where it is damaged."""

        def read() -> dict[str, Any]:
            info = self.info(step)
            checks.check_like(info, wanted, prefix)
            return arrays.read_verified(self._open(), info, wanted)

        try:
            return read()
        except DamagedError as error:
            reason = str(error)
            if self._read_only or not arrays.from_process_0(lambda: self._upkeep.replace(step, reason)):
                raise
        return read()
