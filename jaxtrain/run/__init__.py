"""One run in its directory."""
