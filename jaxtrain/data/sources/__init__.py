"""The sources of rows: text, token shards, mixtures, images, tables and synthetic data."""
