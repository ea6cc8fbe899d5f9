"""The events of a directory as TensorBoard reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_events(directory: Path) -> Iterator[Any]:
    """The complete events of the files, in the order of their names."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        # TFRecord: length (8 bytes), its checksum (4), payload, its checksum (4).
        while (size := int.from_bytes(data[:8], "little")) and len(data) >= 16 + size:
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
