"""What the harness found, as rows of a table and as JSON. No jax here."""

from collections.abc import Mapping
from typing import Any

HEADER = ("task", "version", "filter", "shots", "metric", "value", "stderr", "rows")


def result_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each metric of each task and group, in the order of the harness.

    Args:
        found: What `lm_eval.simple_evaluate` returns.

    Returns:
        Rows with the entries of `HEADER`, and `higher_is_better`; an entry that the harness does not give is None.
        `rows` are the documents that were asked.
    """
    rows = []
    for task, metrics in {**found["results"], **found.get("groups", {})}.items():
        better = found.get("higher_is_better", {}).get(task) or {}
        for key, value in metrics.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "task": task,
                    "version": found.get("versions", {}).get(task),
                    "filter": filtered,
                    "shots": found.get("n-shot", {}).get(task),
                    "metric": metric,
                    "value": value,
                    "stderr": _number(metrics.get(f"{metric}_stderr,{filtered}")),
                    "rows": found.get("n-samples", {}).get(task, {}).get("effective"),
                    "higher_is_better": better.get(metric),
                }
            )
    return rows


def shown_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows as texts, in the order of `HEADER`."""
    return [tuple(_text(row[name]) for name in HEADER) for row in rows]


def _number(value: Any) -> float | None:
    """A standard error; the harness writes `N/A` where there is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
