"""Data that stands still on demand, for runs in processes of their own: `data: {call: watched_parts:read}`."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

import jaxtrain as jt


class _Rows(jt.ArrayRows):
    """Rows that wait where a file says so: `block` for ever, or a number of seconds per batch; `damaged` raises."""

    def __init__(self, columns, marker):
        super().__init__(columns)
        self.marker = marker

    def gather(self, indices):
        try:
            wanted = self.marker.read_text()
        except FileNotFoundError:
            wanted = ""
        if wanted == "block":
            threading.Event().wait()
        elif wanted == "damaged":
            raise jt.DataError("row 7 is damaged")
        elif wanted:
            time.sleep(float(wanted))
        return super().gather(indices)


def _stand_still(*_):
    time.sleep(3600)


def read(folder):
    """Rows whose marker is `folder/<index of the process>`; SIGUSR2 makes the main thread stand still."""
    signal.signal(signal.SIGUSR2, _stand_still)
    index = os.environ.get("JAX_PROCESS_ID", "0")
    random = np.random.default_rng(0)
    columns = {"inputs": random.normal(size=(64, 4)).astype(np.float32), "targets": random.integers(0, 3, 64)}
    data = jt.open_data({"kind": "synthetic", "task": "images", "image_size": 8})
    return dataclasses.replace(
        data,
        train=_Rows(columns, Path(folder) / index),
        validation=jt.ArrayRows({name: column[:16] for name, column in columns.items()}),
        fingerprint={"name": "watched"},
        num_outputs=3,
        input_shape=(4,),
        description=("rows that can stand still",),
    )
