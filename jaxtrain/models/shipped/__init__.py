"""The models that configs describe."""
