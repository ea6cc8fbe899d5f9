"""The pure train step."""
