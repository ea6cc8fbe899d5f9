"""What users see of a run: phases with their time, one bar or one line per logged row, and the result.

Phases and progress are written to standard error, results (a sample, the summary) to standard output, so that the file
of `jaxtrain sample ... > file` holds only the sample. A notebook shows standard error as an error: there, phases and
progress are one output below the cell, which is updated.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from jaxtrain.config.secrets import redacted_text
from jaxtrain.metrics.format import format_clock, format_count, format_duration, format_loss, sparkline
from jaxtrain.runtime.terminal import in_notebook, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

_SLOW_PHASE_SECONDS = 2.0
# The thread that draws the bar takes the interpreter lock from the loop, and each update of a notebook passes through
# the kernel's socket: a few times per second is enough.
_REFRESH_PER_SECOND = 4
_MOST_LINES = 400
_MOST_LOSSES = 1024


class Phase:
    """A phase that is running."""

    remark = ""

    def note(self, text: str) -> None:
        """Set the remark that the line shows in parentheses, such as `from cache`."""
        self.remark = text


class Progress:
    """Shows the progress of a run: live on a terminal and in a notebook, as plain lines elsewhere.

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
        self._losses: list[float] = []
        self._total_steps = 0
        # (step, time) of the first step of this process, which may compile: the remaining time follows from the others.
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Show that a phase runs and, at its end, how long it took, or that it failed."""
        handle, started = Phase(), time.monotonic()
        timer = threading.Timer(_SLOW_PHASE_SECONDS, self._line, (f"{name} …",))
        timer.daemon = True
        if self._view is not None:
            self._view.begin(name)
        elif not self.silent:
            timer.start()
        how = "failed after "
        try:
            yield handle
            how = ""
        finally:
            timer.cancel()
            if self._view is not None:
                self._view.end()
            remark = f" ({handle.remark})" if handle.remark else ""
            self.message(f"{name} … {how}{format_duration(time.monotonic() - started)}{remark}")

    def banner(self, lines: Sequence[str]) -> None:
        """Print lines that describe the run and the settings that were chosen for it."""
        for line in lines:
            self.message(line)

    def start(self, total_steps: int, first_step: int) -> None:
        """Begin to show steps: of the whole run, and those done before this process."""
        self._total_steps, self._first = total_steps, None
        if self._view is not None:
            self._view.start_bar(total_steps, first_step)

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Record that steps are done, with the logged row of this one; empty where it was not logged."""
        if self.silent or not self._total_steps:
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        remaining = ""
        if step > self._first[0] and (values or self._view is not None):
            step_seconds = (now - self._first[1]) / (step - self._first[0])
            remaining = f"ETA {format_clock(max(0, self._total_steps - step) * step_seconds)}"
        loss = values.get("loss")
        if loss is not None:
            self._losses.append(float(loss))
            if len(self._losses) > _MOST_LOSSES:
                self._losses = [*self._losses[:-1:2], self._losses[-1]]
        if self._view is not None:
            self._view.move_bar(step, describe(values), remaining)
        elif values:
            parts = [f"step {step}/{self._total_steps}", *describe(values), remaining]
            self._line("  ".join(parts if remaining and step < self._total_steps else parts[:-1]))

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
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        if len(finite) > 1:
            self._line(f"loss {sparkline(finite)} {format_loss(finite[0])} → {format_loss(self._losses[-1])}")
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
        # The disk of a log is full, or its reader left: a run is not lost over the lines that say how it goes.
        with contextlib.suppress(OSError):
            if not self.silent:
                _write(self._errors, text)


def describe(values: Mapping[str, Any]) -> list[str]:
    """Texts of a logged row: the loss, the rate, the wait for data, MFU, skipped steps and results of evaluation."""
    parts = []
    if values.get("loss") is not None:
        parts.append(f"loss {format_loss(values['loss'])}")
    for unit, short in (("tokens", "tok/s"), ("examples", "examples/s")):
        rate, wait = values.get(f"{unit}_per_second"), values.get("data_wait_seconds")
        if rate is None:
            continue
        parts.append(f"{format_count(rate)} {short}")
        # Not one over `step_seconds`, which is a median: the wait is a mean.
        per_step = values.get(unit, 0) / values.get("step", 1)
        if wait is not None and per_step:
            parts.append(f"data wait {100 * wait * rate / per_step:.0f} %")
    if values.get("model_flops_utilization") is not None:
        parts.append(f"MFU {100 * values['model_flops_utilization']:.1f} %")
    if values.get("skipped_steps"):
        parts.append(f"skipped {values['skipped_steps']}")
    evaluated = {name: value for name, value in values.items() if name.startswith("eval_") and value is not None}
    return [*parts, *(f"{name.replace('_', ' ')} {value:.4g}" for name, value in evaluated.items())]


def _wants_live(stream: TextIO) -> bool:
    if any(os.environ.get(name) for name in ("NO_COLOR", "CI")) or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def _write(stream: TextIO, text: str) -> None:
    """Print a line; characters that the stream's encoding lacks become escapes instead of an error."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding), file=stream, flush=True)


class LiveView:
    """The live display on a terminal, drawn by rich: the bar where there is one, else a spinner with the elapsed time.

    rich is imported at the first call, so that a run whose output is a file does not import it.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._console: Console | None = None
        # The bar or the spinner, and its task.
        self._shown: tuple[RichProgress, TaskID] | None = None
        self._has_bar = False
        self._phases: list[str] = []
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        """Show that a phase runs: as the title of the bar, or beside a spinner where there is no bar."""
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            self._phases.append(name)
            if self._shown is None:
                columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
                view = self._new_view(*columns, transient=True)
                self._shown = view, view.add_task(name, total=None)
            self._name()

    def end(self) -> None:
        """Remove the innermost phase; the caller prints its line with the time."""
        with self._lock:
            if self._phases:
                self._phases.pop()
            if self._phases or self._has_bar:
                self._name()
            else:
                self.close()

    def _name(self) -> None:
        if self._shown is not None:
            view, task = self._shown
            view.update(task, description=self._phases[-1] if self._phases else "training")

    def start_bar(self, total_steps: int, first_step: int) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.table import Column

        self.close()
        view = self._new_view(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remaining]}", markup=False),
            TextColumn("{task.fields[facts]}", markup=False),
        )
        task = view.add_task("training", total=total_steps, completed=first_step, facts="", remaining="")
        self._shown, self._has_bar = (view, task), True

    def move_bar(self, step: int, facts: Sequence[str], remaining: str) -> None:
        """Move the bar; without facts, those that are shown stay."""
        if self._shown is None or not self._has_bar:
            return
        view, task = self._shown
        fields: dict[str, Any] = {"remaining": remaining}
        if facts:
            # A narrow terminal shows the count and the time, not the last facts.
            count = len(str(view.tasks[0].total))
            room = view.console.width - (len("evaluating") + 8 + 2 * count + 1 + len("ETA 00:00:00") + 4)
            shown = ["  ".join(facts[:number]) for number in range(len(facts), -1, -1)]
            fields["facts"] = next(text for text in shown if len(text) <= max(0, room))
        view.update(task, completed=step, **fields)

    def print(self, text: str) -> None:
        """Print a line above the live region."""
        self._open_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the live region; a bar stays on the terminal as it was last drawn."""
        with self._lock:
            if self._shown is not None:
                self._shown[0].stop()
            self._shown, self._has_bar = None, False
            self._phases.clear()

    def _new_view(self, *columns: "ProgressColumn", transient: bool = False) -> "RichProgress":
        from rich.progress import Progress

        view = Progress(
            *columns,
            console=self._open_console(),
            transient=transient,
            refresh_per_second=_REFRESH_PER_SECOND,
            # What the program prints goes above the bar on the same terminal, or to a file where it is redirected.
            redirect_stdout=sys.stdout.isatty(),
            expand=not transient,
        )
        view.start()
        return view

    def _open_console(self) -> "Console":
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream, force_terminal=True)
        return self._console


class NotebookView:
    """The live display in a notebook, with the methods of `LiveView`: one output that is updated below the cell."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._phases: list[str] = []
        self._bar: tuple[int, int] | None = None
        self._facts, self._remaining = "", ""
        self._display: Any = None
        self._shown_at = 0.0
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        with self._lock:
            self._phases.append(name)
            self._show()

    def end(self) -> None:
        with self._lock:
            if self._phases:
                self._phases.pop()

    def start_bar(self, total_steps: int, first_step: int) -> None:
        with self._lock:
            self._bar = (first_step, total_steps)
            self._show()

    def move_bar(self, step: int, facts: Sequence[str], remaining: str) -> None:
        with self._lock:
            if self._bar is None:
                return
            self._bar = (step, self._bar[1])
            self._facts, self._remaining = "  ".join(facts) or self._facts, remaining
            if time.monotonic() - self._shown_at >= 1 / _REFRESH_PER_SECOND or step == self._bar[1]:
                self._show()

    def print(self, text: str) -> None:
        with self._lock:
            self._lines = [*self._lines, *text.splitlines()][-_MOST_LINES:]
            self._show()

    def close(self) -> None:
        """Show the last values; they stay below the cell."""
        with self._lock:
            if self._display is not None:
                self._phases, self._remaining = [], ""
                self._show()
                self._display = None

    def _show(self) -> None:
        from IPython.display import display  # it is there, because the kernel runs in it

        phase = f"{self._phases[-1]} …" if self._phases else ""
        count = "" if self._bar is None else f"{self._bar[0]:,}/{self._bar[1]:,}"
        status = "  ".join(part for part in (count, phase, self._remaining, self._facts) if part)
        log = "\n".join(self._lines)
        parts = [f'<pre style="margin:0;font-size:0.85em;white-space:pre-wrap">{escape(log)}</pre>']
        if self._bar is not None:
            style = "width:100%;max-width:40em;display:block"
            parts.append(f'<progress value="{self._bar[0]}" max="{max(self._bar[1], 1)}" style="{style}"></progress>')
        parts.append(f'<code style="font-size:0.85em;white-space:pre-wrap">{escape(status)}</code>')
        html = f'<div class="jaxtrain-progress">{"".join(parts)}</div>'
        content = {"text/html": html, "text/plain": "\n".join(filter(None, (log, status)))}
        self._shown_at = time.monotonic()
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)
