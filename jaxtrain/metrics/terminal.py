"""The live display on a terminal, drawn by rich: a spinner while a phase runs, a bar while steps run."""

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

# The thread that draws the bar takes the interpreter lock from the loop: a few times per second is enough.
_REFRESH_PER_SECOND = 4
# The task of a phase that the bar shows as its title.
_NO_TASK = cast("TaskID", -1)


class LiveView:
    """Shows one live region at a time: the bar where there is one, else spinners with the elapsed time.

    rich is imported at the first call, so that a run whose output is a file does not import it.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._console: Console | None = None
        self._bar: RichProgress | None = None
        self._bar_task = _NO_TASK
        self._spinner: RichProgress | None = None
        self._phases: list[tuple[str, TaskID]] = []
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        """Show that a phase runs: as the title of the bar, or as a line with a spinner where there is no bar."""
        with self._lock:
            if self._bar is not None:
                self._phases.append((name, _NO_TASK))
                self._bar.update(self._bar_task, description=name)
                return
            spinner = self._spinner or self._start_spinner()
            self._phases.append((name, spinner.add_task(name, total=None)))

    def end(self) -> None:
        """Remove the innermost phase; the caller prints its line with the time."""
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
        """Show the bar.

        Args:
            total_steps: steps of the run.
            first_step: steps done before this process.
        """
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
        """Move the bar.

        Args:
            step: steps done.
            facts: texts such as the loss, in order of importance; empty: the texts that are shown stay.
            remaining: text of the remaining time; None: it is not known.
        """
        if self._bar is None:
            return
        fields: dict[str, Any] = {"remaining": remaining or ""}
        if facts:
            fields["facts"] = self._fitting(self._bar, facts)
        self._bar.update(self._bar_task, completed=step, **fields)

    def _fitting(self, bar: "RichProgress", facts: Sequence[str]) -> str:
        """Join as many facts as fit on the line; a narrow terminal shows the count and the time, not the last facts."""
        count = len(str(bar.tasks[0].total))
        room = self._open_console().width - (len("evaluating") + 8 + 2 * count + 1 + len("ETA 00:00:00") + 4)
        shown = ""
        for fact in facts:
            longer = f"{shown}  {fact}" if shown else fact
            if len(longer) > room:
                break
            shown = longer
        return shown

    def print(self, text: str) -> None:
        """Print a line above the live region."""
        self._open_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the live region; a bar stays on the terminal as it was last drawn."""
        with self._lock:
            for view in (self._spinner, self._bar):
                if view is not None:
                    view.stop()
            self._spinner = self._bar = None
            self._phases.clear()

    def _start_spinner(self) -> "RichProgress":
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._spinner = self._new_view(*columns, transient=True)
        self._spinner.start()
        return self._spinner

    def _new_view(self, *columns: "ProgressColumn", transient: bool = False) -> "RichProgress":
        from rich.progress import Progress

        return Progress(
            *columns,
            console=self._open_console(),
            transient=transient,
            refresh_per_second=_REFRESH_PER_SECOND,
            # What the program prints goes above the bar on the same terminal, or to a file where it is redirected.
            redirect_stdout=sys.stdout.isatty(),
            expand=not transient,
        )

    def _open_console(self) -> "Console":
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._stream, force_terminal=True)
        return self._console
