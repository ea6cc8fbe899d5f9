"""Continuous batching: many requests share a fixed number of cache rows, and two programs serve them all."""
