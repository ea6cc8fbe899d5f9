"""Dollars and hours of a training run."""
