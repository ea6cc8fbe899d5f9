"""Portable programs: a model's forward pass as StableHLO, with its weights beside it."""
