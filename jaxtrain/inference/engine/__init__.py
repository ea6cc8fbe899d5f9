"""Continuous batching: many requests share a fixed number of cache rows, and a few programs serve them all."""
