"""Shows a pipeline schedule as text or as a picture, to compare numbers of stages and microbatches.

python scripts/show_schedule.py 1f1b --stages 4 --microbatches 16
python scripts/show_schedule.py interleaved_1f1b --stages 4 --microbatches 16 --chunks 2 --picture schedule.png
"""

import argparse
import shutil
import sys
from collections.abc import Sequence

from jaxtrain.errors import UserError
from jaxtrain.parallel.draw_schedule import draw_picture, draw_text
from jaxtrain.parallel.schedules import SCHEDULES, make_schedule


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):
        self.exit(2, f"show_schedule: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the schedule, and return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, required=True, help="pipeline stages (parallel.pipe)")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches per step (parallel.microbatches)")
    parser.add_argument(
        "--chunks", type=int, default=1, help="chunks of layers per stage (parallel.chunks); default: 1"
    )
    parser.add_argument("--picture", metavar="PNG", help="also draw the schedule to this file")
    options = parser.parse_args(arguments)
    try:
        schedule = make_schedule(options.schedule, options.stages, options.microbatches, options.chunks)
    except UserError as error:
        print(f"show_schedule: {error}", file=sys.stderr)
        return error.exit_code
    print(draw_text(schedule, width=shutil.get_terminal_size((120, 24)).columns))
    if options.picture:
        try:
            draw_picture(schedule, options.picture)
        except OSError as error:
            print(f"show_schedule: --picture: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
