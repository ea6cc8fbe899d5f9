"""Connects the processes of a run for their heartbeats: process 0 listens, and all learn where."""

import json
import secrets
import socket
from collections.abc import Callable

from jaxtrain.runtime.cluster import detect_cluster
from jaxtrain.runtime.heartbeats import Alone, Exchange

_MOST_BYTES = 512


def open_exchange(*, wanted: bool, report: Callable[[str], None]) -> Exchange:
    """The exchange of this process with the others of its cluster; every process calls it.

    Args:
        wanted: whether process 0 listens; what it decides holds for all.
        report: called with one line where process 0 cannot be reached.

    Returns:
        `Alone` for a single process, and where heartbeats are not wanted.
    """
    import jax

    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return Alone()
    import numpy as np
    from jax.experimental import multihost_utils

    from jaxtrain.runtime.hub import Hub
    from jaxtrain.runtime.spoke import Spoke

    hub: Hub | None = None
    message = b""
    if jax.process_index() == 0 and wanted:
        cluster = detect_cluster()
        coordinator = None if cluster is None or cluster.coordinator is None else cluster.coordinator
        host = None if coordinator is None else coordinator.rpartition(":")[0].strip("[]")
        token = secrets.token_hex(16)
        hub = Hub(jax.process_count(), token, host=host)
        hosts = [name for name in (host, socket.gethostname()) if name]
        message = json.dumps({"hosts": list(dict.fromkeys(hosts)), "port": hub.port, "token": token}).encode()
    padded = np.frombuffer(message[:_MOST_BYTES].ljust(_MOST_BYTES), np.uint8)
    # Over jax's own collectives, so that no address has to be known before and no secret is on a command line.
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().strip()
    if hub is not None:
        return hub
    if not told:
        return Alone()
    found = json.loads(told)
    return Spoke(jax.process_index(), found["token"], hosts=found["hosts"], port=found["port"], report=report)
