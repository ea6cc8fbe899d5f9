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
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from jaxtrain.config.secrets import redacted_text
from jaxtrain.metrics.format import format_clock, format_count, format_duration, format_loss
from jaxtrain.runtime.terminal import in_notebook, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_SLOW_PHASE_SECONDS = 2.0
# The thread that draws the bar takes the interpreter lock from the loop, and each update of a notebook passes through
# the kernel's socket: a few times per second is enough.
_REFRESH_PER_SECOND = 4
_MOST_LINES = 400


class Phase:
    """A phase that is running."""

    remark = ""

    def note(self, text: str) -> None:
        """Set the remark that the line shows in parentheses, such as `from cache`."""
        self.remark = text


class Progress:
    """Shows the progress of a run: live on a terminal and in a notebook, as plain lines elsewhere.

    Only process 0 prints: phases and progress to `errors` (standard error, in a notebook the output of the cell),
    results to `output` (standard output). `live` is chosen by the stream, NO_COLOR and CI where it is None.
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
        """End the bar and print the summary as a result."""
        self.close()
        if summary_lines:
            self.result("\n".join(summary_lines))

    def result(self, text: str) -> None:
        """Print the answer of the command to standard output."""
        if not self.silent:
            self.close()
            _write(self._output, redacted_text(printable(text)))

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


class _View:
    """What is shown while a run goes on: the innermost phase, the bar of steps and the last facts; see `_show`."""

    def __init__(self) -> None:
        self._phases: list[str] = []
        self._bar: tuple[int, int] | None = None  # steps done, and all
        self._facts: Sequence[str] = ()
        self._remaining = ""
        self._shown_at = 0.0
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        """Show that a phase runs."""
        with self._lock:
            self._phases.append(name)
            self._show()

    def end(self) -> None:
        """Remove the innermost phase; the caller prints its line with the time."""
        with self._lock:
            if self._phases:
                self._phases.pop()
                self._show()

    def start_bar(self, total_steps: int, first_step: int) -> None:
        """Show the bar."""
        with self._lock:
            self._bar = (first_step, total_steps)
            self._show()

    def move_bar(self, step: int, facts: Sequence[str], remaining: str) -> None:
        """Move the bar; without facts, those that are shown stay."""
        with self._lock:
            if self._bar is not None:
                self._bar = (step, self._bar[1])
                self._facts, self._remaining = facts or self._facts, remaining
                if time.monotonic() - self._shown_at >= 1 / _REFRESH_PER_SECOND or step == self._bar[1]:
                    self._show()

    def _show(self) -> None:
        raise NotImplementedError


class LiveView(_View):
    """The live display on a terminal, drawn by rich: the bar where there is one, else a spinner with the elapsed time.

    rich is imported at the first call, so that a run whose output is a file does not import it.
    """

    def __init__(self, stream: TextIO):
        super().__init__()
        self._stream = stream
        self._console: Console | None = None
        self._live: Live | None = None

    def print(self, text: str) -> None:
        """Print a line above the live region."""
        self._open_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the live region; a bar stays on the terminal as it was last drawn."""
        with self._lock:
            if self._live is not None:
                self._live.transient = self._bar is None
                self._live.stop()
            self._live, self._bar, self._phases = None, None, []

    def _show(self) -> None:
        if self._bar is None and not self._phases:
            self.close()
        elif self._live is None:
            from rich.live import Live
            from rich.spinner import Spinner

            self._spinner, self._began = Spinner("dots"), time.monotonic()
            self._live = Live(
                get_renderable=self._drawn,
                console=self._open_console(),
                refresh_per_second=_REFRESH_PER_SECOND,
                # What the program prints goes above the bar on the same terminal, or to a file.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start(refresh=True)

    def _drawn(self) -> "Table":
        """One line; a narrow terminal shows the count and the time, not the last facts."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        phase, bar = self._phases[-1] if self._phases else "training", self._bar
        table = Table.grid(padding=(0, 1), expand=bar is not None)
        if bar is None:
            table.add_row(self._spinner, Text(phase), format_clock(time.monotonic() - self._began))
            return table
        count = f"{bar[0]}/{bar[1]}"
        room = self._open_console().width - (len("evaluating") + 8 + len(count) + len("ETA 00:00:00") + 4)
        shown = ["  ".join(self._facts[:number]) for number in range(len(self._facts), -1, -1)]
        facts = next(text for text in shown if len(text) <= max(0, room))
        for ratio in (None, 1, None, None, None):
            table.add_column(ratio=ratio, no_wrap=True)
        table.add_row(Text(phase), ProgressBar(bar[1], bar[0]), count, self._remaining, Text(facts))
        return table

    def _open_console(self) -> "Console":
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream, force_terminal=True)
        return self._console


class NotebookView(_View):
    """The live display in a notebook: one output that is updated below the cell."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._display: Any = None

    def print(self, text: str) -> None:
        """Print lines above the bar."""
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

        phase, log = f"{self._phases[-1]} …" if self._phases else "", "\n".join(self._lines)
        count = "" if self._bar is None else f"{self._bar[0]:,}/{self._bar[1]:,}"
        status = "  ".join(part for part in (count, phase, self._remaining, *self._facts) if part)
        bar = ""
        if self._bar is not None:
            style = "width:100%;max-width:40em;display:block"
            bar = f'<progress value="{self._bar[0]}" max="{max(self._bar[1], 1)}" style="{style}"></progress>'
        style = "margin:0;font-size:0.85em;white-space:pre-wrap"
        html = f'<div><pre style="{style}">{escape(log)}</pre>{bar}<code style="{style}">{escape(status)}</code></div>'
        content = {"text/html": html, "text/plain": "\n".join(filter(None, (log, status)))}
        self._shown_at = time.monotonic()
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)
