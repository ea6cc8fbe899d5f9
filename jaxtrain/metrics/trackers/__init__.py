"""Dashboards of other projects that a run is shown on, each behind a queue and a thread of its own."""
