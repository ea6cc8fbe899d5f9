"""What /metrics says, in the text format of Prometheus. No jax here."""

import bisect
import dataclasses
import threading
from collections import Counter

from jaxtrain.inference.engine.request import EngineCounters

# Upper bounds in seconds: the first token of a short prompt on an accelerator, up to long answers on a CPU.
_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PREFIX = "jaxtrain"
# Counters of the engine that go up and down, and what each of all of them is.
_GAUGES = {
    "slots": "rows of the cache",
    "slots_in_use": "rows of the cache that a request has",
    "queued": "requests that have no slot yet",
}
_TOTALS = {
    "requests": "requests that the engine accepted",
    "finished": "of them that have ended",
    "generated_tokens": "tokens that were written",
    "prompt_tokens": "tokens of the prompts that were read",
    "cached_tokens": "of them that had been read before",
    "decode_steps": "steps that gave each running answer a token",
    "prefill_chunks": "steps that read a part of a prompt",
    "compiled": "programs compiled after the start; 0 unless something is wrong",
    "speculated_tokens": "tokens that were drafted",
    "accepted_tokens": "of them that were right",
}


class Seconds:
    """How long something took, counted by upper bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Counts one more."""
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, help_text: str) -> list[str]:
        """The lines of a histogram."""
        lines, below = _begin(name, help_text, "histogram"), 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {below}"]


class HttpCounters:
    """What the server itself counts; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._left = 0
        self._first_token, self._whole = Seconds(), Seconds()

    def answered(self, path: str, status: int) -> None:
        """An answer was given, or begun.

        Args:
            path: of the endpoint; never what a client made up, of which there are too many.
            status: of the answer.
        """
        with self._lock:
            self._answers[path, status] += 1

    def left(self) -> None:
        """A client left before it had its answer."""
        with self._lock:
            self._left += 1

    def timed(self, *, first_token: float | None = None, whole: float | None = None) -> None:
        """An answer had its first token, or ended, so many seconds after its request."""
        with self._lock:
            if first_token is not None:
                self._first_token.add(first_token)
            if whole is not None:
                self._whole.add(whole)

    def lines(self) -> list[str]:
        """The lines of all that was counted."""
        with self._lock:
            name = f"{_PREFIX}_http_answers_total"
            lines = _begin(name, "answers by endpoint and status", "counter")
            lines += [
                f'{name}{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._answers.items())
            ]
            left = f"{_PREFIX}_http_clients_left_total"
            lines += [
                *_begin(left, "clients that left before they had their answer", "counter"),
                f"{left} {self._left}",
            ]
            first, whole = f"{_PREFIX}_first_token_seconds", f"{_PREFIX}_answer_seconds"
            lines += self._first_token.lines(first, "seconds from a request to its first token")
            return lines + self._whole.lines(whole, "seconds from a request to the end of its answer")


def metrics_text(http: HttpCounters, engine: EngineCounters | None, *, compiled: int | None = None) -> str:
    """The page of /metrics.

    Args:
        http: what the server counted.
        engine: what the engine counted; None: the server has none.
        compiled: without an engine: programs that were compiled after the start; None: it is not known.
    """
    lines = http.lines()
    found = {} if compiled is None else {"compiled": compiled}
    found = found if engine is None else dataclasses.asdict(engine)
    for name, text in _TOTALS.items():
        if name in found:
            lines += [*_begin(f"{_PREFIX}_{name}_total", text, "counter"), f"{_PREFIX}_{name}_total {found[name]}"]
    for name, text in _GAUGES.items():
        if name in found:
            lines += [*_begin(f"{_PREFIX}_{name}", text, "gauge"), f"{_PREFIX}_{name} {found[name]}"]
    return "\n".join(lines) + "\n"


def _begin(name: str, help_text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
