"""A way to write config files for a test."""

import pytest


@pytest.fixture
def written(tmp_path):
    """A function that writes a config file and returns its path."""

    def write(content, name="mine.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
