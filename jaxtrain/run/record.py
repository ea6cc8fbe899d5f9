"""What a run writes of itself: rows of metrics, run.json from its start to its end, the sample, the report."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import Loaded
from jaxtrain.metrics.progress import Progress
from jaxtrain.metrics.runinfo import finished_info, read_run_info, run_info, write_json_atomic
from jaxtrain.metrics.writers import MultiWriter, Scalars, open_writers
from jaxtrain.run.called_sources import called_sources
from jaxtrain.run.own_parts import OwnParts
from jaxtrain.train.assemble import Run


class RunRecord:
    """The files of a run that grow with it. Only the main process writes; elsewhere every method does nothing.

    A run that was done before this process stays as it is on disk: neither its rows nor its run.json change.

    Args:
        run_dir: directory of the run.
        writers: where rows of metrics go; none on processes other than the main one.
        info: content of run.json at the start; None on processes other than the main one.
        was_done: the run had ended before this process.
        began: `time.monotonic()` at the start of this process's work on the run.
        earlier_seconds: wall time of the processes that worked on this run before.
        draws_report: whether report.html is drawn at the end.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        writers: MultiWriter,
        info: Mapping[str, Any] | None,
        was_done: bool,
        began: float,
        earlier_seconds: float,
        draws_report: bool,
    ) -> None:
        self._run_dir = run_dir
        self._writers = writers
        self._info = None if was_done else info
        self._is_main = info is not None
        self._was_done = was_done
        self._began, self._earlier_seconds = began, earlier_seconds
        self._draws_report = draws_report

    def begin(self, run: Run) -> None:
        """Write run.json with the status `running`, and the tokenizer of the run's data."""
        if self._info is not None:
            write_json_atomic(self._run_dir / "run.json", self._info)
        if self._is_main and run.data.tokenizer is not None:
            run.data.tokenizer.save(self._run_dir / "tokenizer.json")

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
            status: how the run ended: done, preempted, diverged, stopped or failed.
            final: the last metrics.
            progress: shows that the report is drawn.
        """
        writers, self._writers = self._writers, MultiWriter(())
        writers.close()
        if self._info is None:
            return
        seconds = self._earlier_seconds + time.monotonic() - self._began
        final = {**final, "wall_seconds": round(seconds, 2)}
        write_json_atomic(self._run_dir / "run.json", finished_info(self._info, status=status, final=final))
        self._info = None
        if self._draws_report and (self._run_dir / "metrics.jsonl").exists():
            from jaxtrain.metrics.report.page import write_report

            with progress.phase("drawing the report"):
                write_report(self._run_dir)


def open_record(
    loaded: Loaded, run: Run, run_dir: Path, *, start: int, own: OwnParts, began: float, main: bool
) -> RunRecord:
    """Open the writers of a run and say what its run.json will hold; rows after the resumed step are dropped.

    Args:
        loaded: the config.
        run: assembled from it.
        run_dir: directory of the run.
        start: steps done before this process; 0 for a fresh run.
        own: the parts that came from Python, by name.
        began: `time.monotonic()` at the start of this process's work on the run.
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
            began=began,
            earlier_seconds=0.0,
            draws_report=draws_report,
        )
    info = _info(loaded, run, own)
    before = read_run_info(run_dir) if start else {}
    # Last, because whatever fails after it would leave them open.
    writers = open_writers(run_dir, config.logging, run_name=loaded.name, resumed_step=start)
    info["created"] = before.get("created") or info["created"]
    return RunRecord(
        run_dir,
        writers=writers,
        info=info,
        was_done=start >= config.train.steps and before.get("status") == "done",
        began=began,
        earlier_seconds=(before.get("final") or {}).get("wall_seconds") or 0.0,
        draws_report=draws_report,
    )


def _info(loaded: Loaded, run: Run, own: OwnParts) -> dict[str, Any]:
    data = run.data
    info = run_info(
        run.config,
        name=loaded.name,
        mesh_shape=dict(run.step.mesh.shape),
        model={"name": run.step.model.name, "num_parameters": run.num_parameters},
        data={"description": list(data.description), "fingerprint": data.fingerprint, "reading": data.reading},
    )
    info["from_python"] = own
    info["called"] = called_sources(run.config, own)
    info["choices"] = list(run.step.choices)
    info["compiler_options"] = dict(run.step.compiler_options.used)
    return info
