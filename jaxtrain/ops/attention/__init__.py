"""Attention: the table of implementations, and one file per implementation."""
