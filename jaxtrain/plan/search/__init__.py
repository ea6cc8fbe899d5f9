"""From a config and hardware to an estimate, advice, and the best layout."""
