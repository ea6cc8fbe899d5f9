"""Measurements of devices and of the parts of a step."""
