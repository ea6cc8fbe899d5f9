"""The live display on a terminal: a spinner while a phase runs, a bar while steps run. Nothing but rich's calls."""

import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

# The bar is drawn by a thread that takes the interpreter lock from the loop: a few times a second is enough.
_REFRESH_PER_SECOND = 4


class LiveView:
    """One live region at a time: the bar when there is one, else spinners with elapsed time.

    rich is imported at the first call: a run whose output is a file never pays for it.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._console: Any = None
        self._bar: Any = None
        self._bar_task: Any = None
        self._spinner: Any = None
        self._phases: list[tuple[str, Any]] = []
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        """Shows that a phase runs: in place of the bar's title, else as a line with a spinner."""
        with self._lock:
            if self._bar is not None:
                self._phases.append((name, None))
                self._bar.update(self._bar_task, description=name)
                return
            spinner = self._spinner or self._start_spinner()
            self._phases.append((name, spinner.add_task(name, total=None)))

    def end(self) -> None:
        """Takes the innermost phase away; its line with the time is printed by the caller."""
        with self._lock:
            if not self._phases:
                return
            _, task = self._phases.pop()
            if self._bar is not None:
                self._bar.update(self._bar_task, description=self._phases[-1][0] if self._phases else "training")
            elif self._spinner is not None:
                self._spinner.remove_task(task)
                if not self._phases:
                    self._spinner.stop()
                    self._spinner = None

    def start_bar(self, total_steps: int, first_step: int) -> None:
        """Shows the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.table import Column

        self.close()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remaining]}", markup=False),
            TextColumn("{task.fields[facts]}", markup=False),
        )
        self._bar = self._new_view(*columns)
        self._bar_task = self._bar.add_task("training", total=total_steps, completed=first_step, facts="", remaining="")
        self._bar.start()

    def move_bar(self, step: int, facts: Sequence[str], remaining: str | None) -> None:
        """Moves the bar; without facts those shown stay."""
        if self._bar is None:
            return
        fields: dict[str, str] = {"remaining": remaining or ""}
        if facts:
            fields["facts"] = self._fitting(facts)
        self._bar.update(self._bar_task, completed=step, **fields)

    def _fitting(self, facts: Sequence[str]) -> str:
        """As many facts as fit on the line: on a narrow terminal the last ones go, and not the count or the time."""
        count = len(str(self._bar.tasks[0].total))
        room = self._open_console().width - (len("evaluating") + 8 + 2 * count + 1 + len("ETA 00:00:00") + 4)
        shown = ""
        for fact in facts:
            longer = f"{shown}  {fact}" if shown else fact
            if len(longer) > room:
                break
            shown = longer
        return shown

    def print(self, text: str) -> None:
        """Prints a line above what is live."""
        self._open_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends what is live; a bar stays on the terminal as it was last."""
        with self._lock:
            for view in (self._spinner, self._bar):
                if view is not None:
                    view.stop()
            self._spinner = self._bar = None
            self._phases.clear()

    def _start_spinner(self) -> Any:
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._spinner = self._new_view(*columns, transient=True)
        self._spinner.start()
        return self._spinner

    def _new_view(self, *columns: Any, transient: bool = False) -> Any:
        from rich.progress import Progress

        return Progress(
            *columns,
            console=self._open_console(),
            transient=transient,
            refresh_per_second=_REFRESH_PER_SECOND,
            # Prints of the program go above the bar on the same terminal, and into a file when they are sent there.
            redirect_stdout=sys.stdout.isatty(),
            expand=not transient,
        )

    def _open_console(self) -> Any:
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream, force_terminal=True)
        return self._console
