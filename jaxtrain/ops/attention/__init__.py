"""Attention: the table of implementations, and each of them."""
