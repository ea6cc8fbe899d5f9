"""What a run writes of itself: rows of metrics, run.json from its start to its end, the sample, the report."""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import Loaded
from jaxtrain.layout.rules import entry_axes
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import finished_info, read_run_info, run_info, write_json_atomic
from jaxtrain.metrics.time_spent import TimeSpent, save_entry, with_save
from jaxtrain.metrics.writers import MultiWriter, Scalars, open_writers
from jaxtrain.models.tasks import is_shipped
from jaxtrain.run.published import keep_published
from jaxtrain.run.restarted import seconds_before
from jaxtrain.run.shown_chats import shown_chats
from jaxtrain.run.watch import EARLY_STOPPED
from jaxtrain.runtime.files import strict_json, write_text_atomic
from jaxtrain.runtime.tree_path import path_name
from jaxtrain.train.assemble import Run


class RunRecord:
    """The files of a run that grow with it. Only the main process writes; elsewhere every method does nothing.

    A run that was done before this process stays as it is on disk: neither its rows nor its run.json change.

    Args:
        run_dir: directory of the run.
        writers: where rows of metrics go; none on processes other than the main one.
        info: content of run.json at the start; None on processes other than the main one.
        was_done: the run had ended before this process.
        spent: where the time of the run goes.
        draws_report: whether report.html is drawn at the end.

    Attributes:
        spent: as given; who spends time on the run adds it there.
        draws_report: as given.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        writers: MultiWriter,
        info: Mapping[str, Any] | None,
        was_done: bool,
        spent: TimeSpent,
        draws_report: bool,
    ) -> None:
        self._run_dir = run_dir
        self._writers = writers
        self._info = None if was_done else info
        self._is_main = info is not None
        self._was_done = was_done
        self.spent = spent
        self.draws_report = draws_report

    def begin(self, run: Run) -> None:
        """Write run.json with the status `running`, and the tokenizer of the run's data."""
        if self._info is not None:
            write_json_atomic(self._run_dir / "run.json", self._info)
        if self._is_main and run.data.tokenizer is not None:
            run.data.tokenizer.save(self._run_dir / "tokenizer.json")
        if self._is_main and self.draws_report:
            self._write("rows.json", shown_chats(run.data))

    def keep_time(self, step: int) -> None:
        """Write into run.json where the time went until this save: a run that is killed goes on counting from it."""
        if self._info is not None:
            seconds = self.spent.seconds()
            saves = with_save(self._info.get("saves"), save_entry(step, seconds, at=time.time()))
            self._info = {**self._info, "seconds": seconds, "saves": saves}
            write_json_atomic(self._run_dir / "run.json", self._info)

    def held_out(self, found: Mapping[str, Any] | None) -> None:
        """Write what the report shows of single held-out rows to held_out.json; None: there is nothing to show."""
        if self._is_main:
            self._write("held_out.json", found)

    def _write(self, name: str, found: Mapping[str, Any] | None) -> None:
        """Write what only the report reads; None: nothing."""
        if found is not None:
            # On one line: indented, a matrix would have four lines per count.
            content = json.dumps(strict_json(found), ensure_ascii=False, allow_nan=False)
            # No run is lost over its report; a disk that is full shows where run.json is written.
            with contextlib.suppress(OSError):
                write_text_atomic(self._run_dir / name, f"{content}\n")

    def scalars(self, step: int, values: Scalars) -> None:
        """Add a row of metrics."""
        if not self._was_done:
            self._writers.scalars(step, values)

    def sample(self, step: int, text: str) -> None:
        """Write a generated text to sample.txt and to the dashboards."""
        if self._is_main:
            (self._run_dir / "sample.txt").write_text(text, encoding="utf-8")
            if not self._was_done:
                self._writers.text(step, "sample", text)

    def close(self, status: str, final: Scalars, progress: Progress) -> None:
        """Close the writers, write the end into run.json, draw the report; a second call does nothing.

        Args:
            status: how the run ended: done, early stopped, stopped by a callback, preempted, diverged, stopped or
                failed.
            final: the last metrics.
            progress: shows that the report is drawn.
        """
        writers, self._writers = self._writers, MultiWriter(())
        writers.close()
        if self._info is None:
            return
        seconds = self.spent.seconds()
        final = {**final, "wall_seconds": round(sum(seconds.values()), 2)}
        info = {**self._info, "seconds": seconds}
        write_json_atomic(self._run_dir / "run.json", finished_info(info, status=status, final=final))
        self._info = None
        if self.draws_report and (self._run_dir / "metrics.jsonl").exists():
            from jaxtrain.metrics.report.page import write_report

            with progress.phase("drawing the report"):
                write_report(self._run_dir)


def open_record(
    loaded: Loaded,
    run: Run,
    run_dir: Path,
    *,
    start: int,
    has_ended: bool,
    metadata: Mapping[str, Any],
    spent: TimeSpent,
    main: bool,
) -> RunRecord:
    """Open the writers of a run and say what its run.json will hold; rows after the resumed step are dropped.

    Args:
        loaded: the config.
        run: assembled from it.
        run_dir: directory of the run.
        start: steps done before this process; 0 for a fresh run.
        has_ended: whether no step is left to this process.
        metadata: what a checkpoint of the run says of it: the parts that came from Python, and what they compute.
        spent: where the time of this process went so far.
        main: whether this process writes.

    Raises:
        ConfigError: a dashboard is asked for and its package is missing.
    """
    config, draws_report = run.config, run.config.logging.report
    if not main:
        return RunRecord(
            run_dir,
            writers=MultiWriter(()),
            info=None,
            was_done=False,
            spent=spent,
            draws_report=draws_report,
        )
    info = _info(loaded, run, metadata)
    before = read_run_info(run_dir) if start else {}
    # Before the rows of lost steps are dropped, which changes when the file was last written.
    earlier = seconds_before(run_dir, before, start=start, began_at=spent.began_at)
    # Last, because whatever fails after it would leave them open.
    writers = open_writers(run_dir, config.logging, run_name=loaded.name, resumed_step=start)
    adapters = config.finetune.lora is not None
    info["published"] = keep_published(run_dir, config.model, is_resumed=start > 0, is_base=adapters)
    info["created"] = before.get("created") or info["created"]
    info["resumed_after"] = _resumes(before, start)
    info["seconds"] = earlier
    info["saves"] = [save_entry(start, earlier, at=spent.began_at)]
    spent.after(earlier)
    return RunRecord(
        run_dir,
        writers=writers,
        info=info,
        was_done=has_ended and before.get("status") in ("done", EARLY_STOPPED),
        spent=spent,
        draws_report=draws_report,
    )


def _resumes(before: Mapping[str, Any], start: int) -> list[int]:
    """The steps after which the run was resumed, without those that going back to an earlier step undid."""
    found = before.get("resumed_after")
    earlier = [step for step in found if isinstance(step, int) and step < start] if isinstance(found, list) else []
    return [*earlier, start] if start else []


def _info(loaded: Loaded, run: Run, metadata: Mapping[str, Any]) -> dict[str, Any]:
    data = run.data
    inputs = run.batches.spec().get("inputs")
    info = run_info(
        run.config,
        name=loaded.name,
        mesh_shape=dict(run.step.mesh.shape),
        model={
            "name": run.step.model.name,
            "num_parameters": run.num_parameters,
            # Of a task over classes or tokens; a model from Python has no config that says it.
            "num_outputs": run.step.feed.num_classes(run.batches.spec()),
        },
        data={
            "description": list(data.description),
            "fingerprint": data.fingerprint,
            "reading": data.reading,
            # What the model is built from, so that it can be opened where the data is not.
            "input_shape": list(data.input_shape),
            "input_dtype": str(inputs.dtype) if isinstance(inputs, jax.ShapeDtypeStruct) else None,
            "vocab_size": data.vocab_size,
            "num_outputs": data.num_outputs,
        },
    )
    info["task"] = run.step.task.name
    info["task_is_shipped"] = is_shipped(run.step.task)
    info["parameters"] = _parameters(run)
    for key in ("from_python", "called", "digests"):
        info[key] = metadata[key]
    info["base"] = metadata.get("base")
    info["choices"] = list(run.step.choices)
    info["compiler_options"] = dict(run.step.compiler_options.used)
    return info


def _parameters(run: Run) -> dict[str, str]:
    """Parameter path -> `float32[160,448] fsdp,-`: dtype, shape, mesh axes of each dimension; `frozen` at the end."""
    trainable = run.step.program.settings.trainable
    sizes, found = run.step.mesh.shape, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.step.sharded_model.abstract_params):
        name = path_name(path)
        axes = ["+".join(axis for axis in entry_axes(entry) if sizes[axis] > 1) or "-" for entry in leaf.sharding.spec]
        sharding = ",".join(axes) if any(axis != "-" for axis in axes) else ""
        parts = [f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]", sharding]
        parts.append("" if trainable is None or trainable(name) else "frozen")
        found[name] = " ".join(part for part in parts if part)
    return found
