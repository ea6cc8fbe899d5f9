"""A process among others: it starts jax, joins its cluster, acts through process 0, and leaves.

`start` must run before jax touches a device.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jaxtrain.config.arguments import check_whole
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.runtime.cluster import Cluster, detect_cluster, environment_number, in_pod, local_device_ids
from jaxtrain.runtime.compiler import use_cache
from jaxtrain.runtime.heartbeats import LOST
from jaxtrain.runtime.relay import relayed
from jaxtrain.runtime.terminal import print_remark

JOIN_TIMEOUT = "JAXTRAIN_JOIN_TIMEOUT_SECONDS"
_JOIN_SECONDS = 300
# A process that is silent for this long counts as failed, and the others end: they cannot continue without it.
_HEARTBEAT_SECONDS = 30
# While a process starts, the watchdog bears twice the usual silence.
_TIMES_LOST = 3
# jax aborts a process, with a stack trace, when others do not join in time; our own limit ends this much earlier.
_ABORT_MARGIN_SECONDS = 60
# Of a GPU's memory, what jax takes for itself: its own default, 0.75, leaves 20 GiB of an H100 idle. NCCL, cuBLAS and
# CUDA's context need a few GiB. XLA_PYTHON_CLIENT_MEM_FRACTION, where it is set, says otherwise.
GPU_MEMORY_FRACTION = 0.92
_USED_BEFORE = "must be called before any JAX calls"


class NotMetError(UserError):
    """Pods of a job did not meet, which a later start may bring (exit code 70, at which they are started again)."""

    exit_code = LOST


def start(
    *, emulate: int | None = None, compilation_cache: str | None = "auto", lost_seconds: float | None = None
) -> None:
    """Prepare jax: emulated devices, compilation cache and, where a cluster is detected, `jax.distributed`.

    Call it at the top of a script of your own, before anything uses a device. `run_config` calls it by itself. A second
    call with the same number of devices does nothing.

    If other processes do not join in time, this process ends with one line and exit code 2, before jax would abort it;
    in a pod of Kubernetes with 70, after which the pods are started again.

    Args:
        emulate: pretend to have this many CPU devices (in each process); None: the real devices.
        compilation_cache: "auto" (the cache folder of the user), a folder, or None.
        lost_seconds: silence after which the run itself ends where another process is lost (`watchdog.lost_seconds`);
            jax then waits for longer. None: only jax watches, and aborts after 30 seconds.

    Raises:
        ConfigError: emulation is asked for after jax has started, the cache folder cannot be made, or the cluster
            cannot be joined.

    Example:
        >>> jt.start(emulate=len(jax.devices()))  # as a rule a number, such as 8, before anything uses jax
        >>> mesh = jt.make_mesh(data="auto")
    """
    import jax

    if emulate is not None:
        # Each is a thread, and more than this many stop the process.
        emulate = check_whole(emulate, what="emulate (number of devices)", least=1, most=4096, write="start(emulate=8)")
    start_alone(emulate=emulate, compilation_cache=compilation_cache)
    cluster = detect_cluster()
    if cluster is not None and not jax.distributed.is_initialized():
        _join(cluster, lost_seconds)


def start_alone(*, emulate: int | None = None, compilation_cache: str | None = "auto") -> None:
    """Prepare jax as `start` does, but join no cluster.

    A process that helps one of several inherits the environment in which that one joined. If it joined as well, jax
    would take it for a second incarnation, and abort all of them.
    """
    # jax reads it when it first uses a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    if emulate is not None:
        _emulate(emulate)
    use_cache(compilation_cache)


def _emulate(num_devices: int) -> None:
    """Make jax use this many CPU devices in this process."""
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        found = jax.local_devices()
        # A cell of a notebook runs again, and a script may start before a library of its own does.
        if len(found) == num_devices and found[0].platform == "cpu":
            return
        raise ConfigError(
            f"{num_devices} devices can be emulated only before jax is first used in a process, and it uses "
            f"{len(found)} devices ({found[0].platform}) already: call start(emulate={num_devices}) first, or restart "
            "the notebook's kernel"
        ) from None


def _join(cluster: Cluster, lost_seconds: float | None) -> None:
    """Join a cluster, or end with one line where the others do not come in time: jax would abort with a stack trace."""
    import jax

    timeout = environment_number(JOIN_TIMEOUT) or _JOIN_SECONDS
    # There the code of a mistake ends the job for good, and a node that comes late is none.
    is_started_again = cluster.coordinator is None and in_pod()

    def failure(reason: str) -> str:
        rights = " and that their service account may read pods and jobs" if cluster.source == "Kubernetes" else ""
        return (
            f"could not join the cluster found through {cluster.source}: {reason}; check the address and that all "
            f"processes started{rights}"
        )

    def give_up() -> None:
        where = f" at {cluster.coordinator}" if cluster.coordinator else ""
        print_remark(f"jaxtrain: {failure(f'its processes did not meet{where} within {timeout} s')}")
        os._exit(LOST if is_started_again else ConfigError.exit_code)

    silence = _HEARTBEAT_SECONDS if lost_seconds is None else max(_HEARTBEAT_SECONDS, int(_TIMES_LOST * lost_seconds))
    limits: dict[str, Any] = {
        "initialization_timeout": timeout + _ABORT_MARGIN_SECONDS,
        "heartbeat_timeout_seconds": silence,
        "local_device_ids": local_device_ids(),
    }
    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        address = cluster.coordinator
        if address is not None:
            if lost_seconds is not None and cluster.process_id != 0:
                address = relayed(address, timeout=limits["initialization_timeout"], lost=_coordinator_lost)
            limits |= {
                "coordinator_address": address,
                "num_processes": cluster.num_processes,
                "process_id": cluster.process_id,
                # All is known, and jax's detection inside a Slurm job would hide GPUs.
                "cluster_detection_method": "deactivate",
                # The coordinator has no authentication, so it listens on its own address only.
                "coordinator_bind_address": cluster.coordinator if cluster.process_id == 0 else None,
            }
        jax.distributed.initialize(**limits)
    except Exception as error:
        if _USED_BEFORE in str(error):
            raise ConfigError(
                f"the cluster found through {cluster.source} can be joined only before jax is first used in a process, "
                "and it was: call start() first, at the top of the program"
            ) from error
        line = failure((str(error).splitlines() or [type(error).__name__])[0][:200])
        raise (NotMetError if is_started_again else ConfigError)(line) from error
    finally:
        timer.cancel()


def _coordinator_lost() -> None:
    """End this process, whose client of the coordinator waits for an answer that does not come."""
    print_remark("jaxtrain: process 0 was lost: the coordinator closed its connection, and this process ends too")
    os._exit(LOST)


@contextlib.contextmanager
def on_main_process(resource: contextlib.AbstractContextManager[Any], *, does: str = "start the run") -> Iterator[None]:
    """Enter a context on process 0 on behalf of all; if that fails, it raises its UserError, the others a ConfigError
    that it could not do what the context `does`."""
    import jax

    if jax.process_count() == 1:
        with resource:
            yield
        return
    import numpy as np
    from jax.experimental import multihost_utils

    with contextlib.ExitStack() as stack:
        failure: UserError | None = None
        try:
            if is_main_process():
                stack.enter_context(resource)
        except UserError as error:
            failure = error
        if not multihost_utils.broadcast_one_to_all(np.int32(failure is None)):
            raise failure or ConfigError(f"process 0 could not {does}; its message says why")
        yield


def leave(code: int) -> None:
    """End this process at once if it is one of several; return if it is the only one.

    An ordinary exit waits for the other processes, and those wait in a collective for the failed one. When it has
    ended, they notice within the heartbeat timeout and end too.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_main_process() -> bool:
    """Whether this is process 0, which alone writes files and prints.

    Example:
        >>> if jt.is_main_process():
        ...     print("written once")
        written once
    """
    import jax

    return jax.process_index() == 0
