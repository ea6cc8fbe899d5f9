"""Compilers of hardware that is not here."""
