"""Measures the processor time of the watchdog: of process 0 among many, of another process, and of the loop's marks.

    python scripts/watchdog_overhead.py --processes 64 --seconds 20

It prints one JSON object: milliseconds of processor time per second, and microseconds per step.
"""

import argparse
import json
import threading
import time

from jaxtrain.run.activity import Activity
from jaxtrain.runtime.heartbeats import Hub, Spoke

_TOKEN = "measured"
_STEPS = 100_000


def _never(status: object) -> float:
    return 1e9


def step_microseconds() -> float:
    """Processor time of what the loop marks per step."""
    activity = Activity()
    batches = activity.fed(iter(range(_STEPS)), first=1)
    began = time.process_time()
    for number in range(1, _STEPS + 1):
        next(batches)
        activity.finished(number, 0.1)
    return 1e6 * (time.process_time() - began) / _STEPS


def exchange_milliseconds(num_processes: int, seconds: float) -> tuple[float, float]:
    """Processor time per second of process 0's exchange, and of another's, at one round per second."""
    hub = Hub(num_processes, _TOKEN, host="127.0.0.1")
    spokes = [
        Spoke(index, _TOKEN, hosts=["127.0.0.1"], port=hub.port, report=print) for index in range(1, num_processes)
    ]
    activity = Activity()
    end = time.monotonic() + seconds
    spent: dict[int, float] = {}

    def beat(index: int, one: Hub | Spoke) -> None:
        one.round(activity.status(), 1.0, _never)  # connects
        began = time.thread_time()
        while time.monotonic() < end:
            one.round(activity.status(), 1.0, _never)
        spent[index] = 1e3 * (time.thread_time() - began) / (seconds - 1)

    threads = [threading.Thread(target=beat, args=(index, one)) for index, one in enumerate([hub, *spokes])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in (*spokes, hub):
        one.close()
    return spent[0], sorted(spent[index] for index in range(1, num_processes))[(num_processes - 1) // 2]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    arguments = parser.parse_args()
    hub, spoke = exchange_milliseconds(arguments.processes, arguments.seconds)
    answer = {
        "processes": arguments.processes,
        "process_0_ms_per_second": round(hub, 3),
        "other_process_ms_per_second": round(spoke, 3),
        "marks_us_per_step": round(step_microseconds(), 2),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
