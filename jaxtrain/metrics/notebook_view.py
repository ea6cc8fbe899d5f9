"""The live display in a notebook: one output below the cell that shows the messages and one bar, and is updated."""

import threading
import time
from collections.abc import Sequence
from html import escape
from typing import Any

# A browser draws each update anew, and every one of them passes through the kernel's socket.
_SECONDS_BETWEEN_UPDATES = 0.25
_MOST_LINES = 400


class NotebookView:
    """Shows what `LiveView` shows on a terminal; both have the same methods.

    IPython is imported at the first call: it is there, because the kernel runs in it.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._phases: list[str] = []
        self._bar: tuple[int, int] | None = None
        self._facts, self._remaining = "", ""
        self._display: Any = None
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

    def start_bar(self, total_steps: int, first_step: int) -> None:
        """Show the bar.

        Args:
            total_steps: steps of the run.
            first_step: steps done before this process.
        """
        with self._lock:
            self._bar = (first_step, total_steps)
            self._show()

    def move_bar(self, step: int, facts: Sequence[str], remaining: str | None) -> None:
        """Move the bar.

        Args:
            step: steps done.
            facts: texts such as the loss; empty: the texts that are shown stay.
            remaining: text of the remaining time; None: it is not known.
        """
        with self._lock:
            if self._bar is None:
                return
            self._bar = (step, self._bar[1])
            self._facts, self._remaining = "  ".join(facts) or self._facts, remaining or ""
            if time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_UPDATES or step == self._bar[1]:
                self._show()

    def print(self, text: str) -> None:
        """Add a line above the bar."""
        with self._lock:
            self._lines = [*self._lines, *text.splitlines()][-_MOST_LINES:]
            self._show()

    def close(self) -> None:
        """Show the last values; they stay below the cell. A second call does nothing."""
        with self._lock:
            if self._display is not None:
                self._phases, self._remaining = [], ""
                self._show()
                self._display = None

    def _show(self) -> None:
        from IPython.display import display

        content = {"text/html": self._html(), "text/plain": self._text()}
        self._shown_at = time.monotonic()
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)

    def _status(self) -> str:
        """What stands beside the bar, or in its place where there is none."""
        phase = f"{self._phases[-1]} …" if self._phases else ""
        if self._bar is None:
            return phase
        count = f"{self._bar[0]:,}/{self._bar[1]:,}"
        return "  ".join(part for part in (count, phase, self._remaining, self._facts) if part)

    def _text(self) -> str:
        return "\n".join([*self._lines, *([self._status()] if self._status() else [])])

    def _html(self) -> str:
        log = escape("\n".join(self._lines))
        parts = [f'<pre style="margin:0;font-size:0.85em;white-space:pre-wrap">{log}</pre>'] if log else []
        if self._bar is not None:
            done, total = self._bar
            style = "width:100%;max-width:40em;display:block"
            parts.append(f'<progress value="{done}" max="{max(total, 1)}" style="{style}"></progress>')
        status = self._status()
        if status:
            parts.append(f'<code style="font-size:0.85em;white-space:pre-wrap">{escape(status)}</code>')
        return f'<div class="jaxtrain-progress">{"".join(parts)}</div>'
