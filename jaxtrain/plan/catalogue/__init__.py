"""Hardware: what there is, what it can do, what it costs."""
