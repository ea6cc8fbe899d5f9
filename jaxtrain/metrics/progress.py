"""What users see of a run: phases with their time, one bar or one line per logged row, and the result.

Phases and progress are written to standard error, results (a sample, the summary) to standard output, so that the file
of `jaxtrain sample ... > file` holds only the sample. A notebook shows standard error as an error: there, phases and
progress are one output below the cell, which is updated.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from jaxtrain.config.secrets import redacted_text
from jaxtrain.metrics.eta import RemainingTime, Trend
from jaxtrain.metrics.format import format_clock, format_count, format_duration, format_loss
from jaxtrain.metrics.notebook_view import NotebookView
from jaxtrain.metrics.terminal import LiveView
from jaxtrain.runtime.terminal import in_notebook, printable

_SLOW_PHASE_SECONDS = 2.0


class Phase:
    """A phase that is running; `note` adds a remark to the line that is printed at its end."""

    def __init__(self) -> None:
        self.remark = ""

    def note(self, text: str) -> None:
        """Set the remark that the line shows in parentheses, such as `from cache`."""
        self.remark = text


class Progress:
    """Shows the progress of a run: live on a terminal and in a notebook, as plain lines elsewhere.

    Only the first process prints.

    Args:
        process_index: index of the JAX process; only process 0 prints.
        live: True for a bar with the terminal's control codes, False for plain lines; None: a bar where standard error
            is a terminal and neither NO_COLOR nor CI is set, or in a notebook.
        errors: stream for phases and progress; None: standard error, in a notebook the output of the cell.
        output: stream for results; None: standard output.
    """

    def __init__(
        self,
        *,
        process_index: int = 0,
        live: bool | None = None,
        errors: TextIO | None = None,
        output: TextIO | None = None,
    ):
        self.silent = process_index != 0
        notebook = errors is None and in_notebook()
        self._errors = errors if errors is not None else sys.stdout if notebook else sys.stderr
        self._output = output if output is not None else sys.stdout
        is_live = notebook or _wants_live(self._errors) if live is None else live
        self._view: LiveView | NotebookView | None = None
        if is_live and not self.silent:
            self._view = NotebookView() if notebook else LiveView(self._errors)
        self._remaining: RemainingTime | None = None
        self._losses = Trend()
        self._total_steps = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Show that a phase runs and, at its end, how long it took.

        Where the phase raises an error its line says that it failed, and the error is raised again.
        """
        handle = Phase()
        started = time.monotonic()
        timer = None
        if self._view is not None:
            self._view.begin(name)
        elif not self.silent:
            timer = threading.Timer(_SLOW_PHASE_SECONDS, self._line, (f"{name} …",))
            timer.daemon = True
            timer.start()
        failed = True
        try:
            yield handle
            failed = False
        finally:
            seconds = time.monotonic() - started
            if timer is not None:
                timer.cancel()
            if self._view is not None:
                self._view.end()
            remark = f" ({handle.remark})" if handle.remark else ""
            self.message(f"{name} … {'failed after ' if failed else ''}{format_duration(seconds)}{remark}")

    def banner(self, lines: Sequence[str]) -> None:
        """Print lines that describe the run and the settings that were chosen for it."""
        for line in lines:
            self.message(line)

    def start(self, total_steps: int, first_step: int) -> None:
        """Begin to show steps.

        Args:
            total_steps: steps of the run, including those of earlier processes.
            first_step: steps done before this process; 0 for a fresh run.
        """
        self._total_steps = total_steps
        self._remaining = RemainingTime(total_steps, first_step)
        if self._view is not None:
            self._view.start_bar(total_steps, first_step)

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Record that `step` steps are done.

        It is called after every step, so that the remaining time is known from step 2 on.

        Args:
            step: steps done by all processes of the run so far.
            values: the logged row of this step (keys of metrics.jsonl); empty where the step was not logged.
        """
        if self.silent or self._remaining is None:
            return
        self._remaining.update(step, time.monotonic())
        loss = values.get("loss")
        if loss is not None:
            self._losses.add(float(loss))
        if self._view is not None:
            seconds = self._remaining.seconds()
            self._view.move_bar(step, describe(values), None if seconds is None else f"ETA {format_clock(seconds)}")
        elif values:
            seconds = self._remaining.seconds()
            parts = [f"step {step}/{self._total_steps}", *describe(values)]
            if seconds is not None and step < self._total_steps:
                parts.append(f"ETA {format_clock(seconds)}")
            self._line("  ".join(parts))

    def message(self, text: str) -> None:
        """Print a line above the bar; what a terminal would obey is shown as an escape, and no secret is shown."""
        text = redacted_text(printable(text))
        if self._view is not None:
            self._view.print(text)
        else:
            self._line(text)

    def finish(self, summary_lines: Sequence[str]) -> None:
        """End the bar, draw the loss as a small curve and print the summary as a result."""
        self.close()
        curve = self._losses.sparkline()
        if curve:
            first, last = self._losses.ends()
            self._line(f"loss {curve} {format_loss(first)} → {format_loss(last)}")
        if summary_lines:
            self.result("\n".join(summary_lines))

    def result(self, text: str) -> None:
        """Print the answer of the command to standard output."""
        if not self.silent:
            self.close()
            _write(self._output, printable(text))

    def close(self) -> None:
        """Remove the live display from the terminal; a second call does nothing."""
        if self._view is not None:
            self._view.close()

    def _line(self, text: str) -> None:
        if self.silent:
            return
        # The disk of a log is full, or its reader left: a run is not lost over the lines that say how it goes.
        with contextlib.suppress(OSError):
            _write(self._errors, text)


def describe(values: Mapping[str, Any]) -> list[str]:
    """Format the parts of a row that a line of progress shows.

    Args:
        values: a logged row (keys of metrics.jsonl).

    Returns:
        Texts for the loss, the rate, the wait for data, MFU, skipped steps and results of evaluation.
    """
    parts = []
    if values.get("loss") is not None:
        parts.append(f"loss {format_loss(values['loss'])}")
    wait, steps_per_second = values.get("data_wait_seconds"), None
    for unit, short in (("tokens", "tok/s"), ("examples", "examples/s")):
        rate = values.get(f"{unit}_per_second")
        if rate is not None:
            parts.append(f"{format_count(rate)} {short}")
            # Not one over `step_seconds`, which is a median: the wait is a mean.
            per_step = values.get(unit, 0) / values.get("step", 1)
            steps_per_second = rate / per_step if per_step else None
    if steps_per_second is not None and wait is not None:
        parts.append(f"data wait {100 * wait * steps_per_second:.0f} %")
    if values.get("model_flops_utilization") is not None:
        parts.append(f"MFU {100 * values['model_flops_utilization']:.1f} %")
    if values.get("skipped_steps"):
        parts.append(f"skipped {values['skipped_steps']}")
    for name, value in values.items():
        if name.startswith("eval_") and value is not None:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return parts


def _wants_live(stream: TextIO) -> bool:
    if any(os.environ.get(name) for name in ("NO_COLOR", "CI")) or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def _write(stream: TextIO, text: str) -> None:
    """Print a line; characters that the stream's encoding lacks become escapes instead of an error."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), file=stream, flush=True)
