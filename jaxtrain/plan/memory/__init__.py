"""Bytes of a step."""
