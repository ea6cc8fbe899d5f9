"""Rows of text tasks: corrupted tokens, labelled and tagged texts, pairs of texts."""
