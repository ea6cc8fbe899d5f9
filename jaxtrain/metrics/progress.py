"""What people see of a run: phases with their time, one bar or one line a logged row, and the result.

Phases and progress go to standard error, results (a sample, the summary) to standard output, so that
`jaxtrain sample ... > file` holds the sample alone.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from jaxtrain.metrics.eta import RemainingTime, Trend
from jaxtrain.metrics.format import format_clock, format_count, format_duration
from jaxtrain.metrics.terminal import LiveView

_SLOW_PHASE_SECONDS = 2.0


class Phase:
    """A phase that is running; `note` adds a remark to the line it ends with."""

    def __init__(self) -> None:
        self.remark = ""

    def note(self, text: str) -> None:
        """Sets the remark shown in parentheses at the end, such as `from cache`."""
        self.remark = text


class Progress:
    """Shows a run to people: live on a terminal, plain lines elsewhere, nothing on processes other than the first.

    Args:
        process_index: the JAX process; only process 0 prints.
        live: True for a bar with the terminal's control codes, False for plain lines; None decides: live when
            standard error is a terminal and neither NO_COLOR nor CI is set.
        errors: where phases and progress go; None: standard error.
        output: where results go; None: standard output.
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
        self._errors = errors if errors is not None else sys.stderr
        self._output = output if output is not None else sys.stdout
        is_live = _wants_live(self._errors) if live is None else live
        self._view = LiveView(self._errors) if is_live and not self.silent else None
        self._remaining: RemainingTime | None = None
        self._losses = Trend()
        self._total_steps = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Shows that a phase runs and, at its end, how long it took; one that fails says so and raises on."""
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
        """Prints what the run is and what was chosen for it."""
        for line in lines:
            self.message(line)

    def start(self, total_steps: int, first_step: int) -> None:
        """Begins the steps.

        Args:
            total_steps: steps of the whole run, those of earlier processes counted.
            first_step: steps done before this process; 0 for a fresh run.
        """
        self._total_steps = total_steps
        self._remaining = RemainingTime(total_steps, first_step)
        if self._view is not None:
            self._view.start_bar(total_steps, first_step)

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes note that `step` steps are done.

        Args:
            step: steps done in all. Call it after every step, so that the remaining time is known from step 2 on.
            values: the logged row of this step (keys of metrics.jsonl), empty when the step was not logged.
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
        """Prints a line above the bar."""
        if self._view is not None:
            self._view.print(text)
        else:
            self._line(text)

    def finish(self, summary_lines: Sequence[str]) -> None:
        """Ends the bar, draws the loss as a small curve and prints the summary as a result."""
        self.close()
        curve = self._losses.sparkline()
        if curve:
            first, last = self._losses.ends()
            self._line(f"loss {curve} {first:.3f} → {last:.3f}")
        if summary_lines:
            self.result("\n".join(summary_lines))

    def result(self, text: str) -> None:
        """Prints what the command was asked for to standard output."""
        if not self.silent:
            self.close()
            _write(self._output, text)

    def close(self) -> None:
        """Takes the live display off the terminal; safe to call twice."""
        if self._view is not None:
            self._view.close()

    def _line(self, text: str) -> None:
        if not self.silent:
            _write(self._errors, text)


def describe(values: Mapping[str, Any]) -> list[str]:
    """The parts of a row that people follow: loss, rate, data wait, skipped steps and evaluation results."""
    parts = []
    if values.get("loss") is not None:
        parts.append(f"loss {values['loss']:.3f}")
    for unit, short in (("tokens", "tok/s"), ("examples", "examples/s")):
        if values.get(f"{unit}_per_second") is not None:
            parts.append(f"{format_count(values[f'{unit}_per_second'])} {short}")
    step_seconds, wait = values.get("step_seconds"), values.get("data_wait_seconds")
    if step_seconds and wait is not None:
        # The wait is a mean and the step a median: a single slow read can exceed one usual step.
        parts.append(f"data wait {min(100.0, 100 * wait / step_seconds):.0f} %")
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
    """Prints a line; signs that the stream's encoding lacks become escapes instead of an error."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), file=stream, flush=True)
