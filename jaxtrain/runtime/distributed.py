"""A process among others: it starts jax, joins its cluster, agrees with the others, acts through process 0, and leaves.

`start` must run before jax touches a device.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxtrain.config.arguments import check_whole
from jaxtrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    LostProcessError,
    StorageError,
    UserError,
    first_line,
)
from jaxtrain.runtime.cluster import Cluster, detect_cluster, environment_number, in_pod, local_device_ids
from jaxtrain.runtime.compiler import use_cache
from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    from jax.sharding import Mesh

JOIN_TIMEOUT = "JAXTRAIN_JOIN_TIMEOUT_SECONDS"
_JOIN_SECONDS = 300
# jax aborts a process, with a stack trace, when others do not join in time; our own limit ends this much earlier.
_ABORT_MARGIN_SECONDS = 60
_OTHERS_END_SECONDS = 5.0
# Of a GPU's memory, what jax takes for itself: its own default, 0.75, leaves 20 GiB of an H100 idle. NCCL, cuBLAS and
# CUDA's context need a few GiB. XLA_PYTHON_CLIENT_MEM_FRACTION, where it is set, says otherwise.
GPU_MEMORY_FRACTION = 0.92
_USED_BEFORE = "must be called before any JAX calls"
Work = TypeVar("Work")
# Fact -> its value and where it was set ("" where that says nothing).
Facts = Mapping[str, tuple[str, str]]

# A process that died ends the others within the heartbeat timeout, so this limits only what all are waiting for.
_LONGEST_WAIT_MILLISECONDS = 7 * 24 * 3600 * 1000
_MOST_NAMED, _LONGEST_VALUE = 8, 80
_ERRORS = {error.exit_code: error for error in (ConfigError, DataError, CheckpointError, DivergedError, StorageError)}
# Every process asks for the same barriers in the same order, and none of them twice.
_numbers = itertools.count()


def start(*, emulate: int | None = None, compilation_cache: str | None = "auto", lost_seconds: int = 25) -> None:
    """Prepare jax: emulated devices, compilation cache and, where a cluster is detected, `jax.distributed`.

    Call it at the top of a script of your own, before anything uses a device. `run_config` calls it by itself. A second
    call with the same number of devices does nothing.

    If other processes do not join in time, this process ends with one line and exit code 2, before jax would abort it;
    in a pod of Kubernetes with 70, after which the pods are started again.

    Args:
        emulate: pretend to have this many CPU devices (in each process); None: the real devices.
        compilation_cache: "auto" (the cache folder of the user), a folder, or None.
        lost_seconds: silence after which another process counts as lost, and jax aborts this one.

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


def _join(cluster: Cluster, lost_seconds: int) -> None:
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
        print_remark(f"jaxtrain: {failure(f'its processes did not connect{where} within {timeout} s')}")
        os._exit((LostProcessError if is_started_again else ConfigError).exit_code)

    limits: dict[str, Any] = {
        "initialization_timeout": timeout + _ABORT_MARGIN_SECONDS,
        "heartbeat_timeout_seconds": lost_seconds,
        "local_device_ids": local_device_ids(),
    }
    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        if cluster.coordinator is not None:
            limits |= {
                "coordinator_address": cluster.coordinator,
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
        line = failure(first_line(error))
        raise (LostProcessError if is_started_again else ConfigError)(line) from error
    finally:
        timer.cancel()


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


def meet() -> None:
    """Wait until every process is here, before the first collective after work that takes some longer than others.

    Gloo, which carries collectives between CPU processes, lets a process wait for another one for 30 s only; a barrier
    of the coordination service has no such limit.
    """
    import jax

    if jax.process_count() > 1:
        # The public door to the coordination service: jax itself has none.
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=f"jaxtrain {next(_numbers)}", timeout_ms=_LONGEST_WAIT_MILLISECONDS)


def compiled_by_all(mesh: "Mesh", compile_program: Callable[[], object]) -> None:
    """Compile a program in every process before one of them runs it, and waits in its first collective for the others.

    Where not every process has devices of the mesh nothing is done, since the call of the program compiles it; what
    `compile_program` gives is dropped, because jax keeps it for the call.
    """
    import jax

    count = jax.process_count()
    if count > 1 and len({device.process_index for device in mesh.devices.flat}) == count:
        compile_program()
        meet()


def together(work: Callable[[], Work], *, says: Callable[[Work], Facts] = lambda work: {}) -> Work:
    """Do the same work in every process, and go on only if all did it and say the same of it; returns what it gave.

    The work may contain no collective, since a process that fails would be missing in it.

    Raises:
        UserError: the error of the work; where it failed in another process only, one of the same exit code that names
            that process. They have left their cluster then, and are still in it where all raise the same error.
        ConfigError: facts differ; names each with both values.
    """
    import jax

    if jax.process_count() == 1:
        return work()
    result, failure = None, None
    try:
        result = work()
        said = {"facts": {name: list(fact) for name, fact in says(result).items()}}
    except Exception as error:
        failure, line = error, " ".join(str(error).split())
        is_line = isinstance(error, UserError)
        code = error.exit_code if isinstance(error, UserError) else 1
        said = {"failed": line if is_line else f"{type(error).__name__}: {line[:300]}", "code": code}
    everyone = [json.loads(text) for text in _exchange(json.dumps(said, sort_keys=True))]
    verdict = verdict_of(everyone)
    if verdict is None:
        return result  # pyright: ignore[reportReturnType] nobody failed, so it is what the work gave
    if isinstance(failure, UserError) and all(one == said for one in everyone):
        # A program that catches it can go on, as the only process could.
        failure.raised_by_all = True
        raise failure
    # All leave the cluster here, so that none is missed by another one, which would abort.
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
    raise failure or verdict


def check_devices() -> None:
    """Raise a ConfigError in every process where they do not have devices of one kind and number each."""
    import jax

    found: dict[int, Counter[str]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, Counter())[device.device_kind] += 1
    shown = {index: ", ".join(f"{count} x {kind}" for kind, count in each.items()) for index, each in found.items()}
    other = next((index for index, text in shown.items() if text != shown[0]), None)
    if other is not None:
        raise ConfigError(
            f"the processes have different devices: process 0 has {shown[0]}, process {other} has {shown[other]}; "
            "start every process with the same devices"
        )


def _exchange(text: str) -> list[str]:
    """Give every process the texts of all, in the order of the processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    content = np.frombuffer(text.encode(), np.uint8)
    meet()
    sizes = multihost_utils.process_allgather(np.int32(len(content)))
    meet()  # each compiles the wider exchange
    rows = multihost_utils.process_allgather(np.pad(content, (0, int(sizes.max()) - len(content))))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def verdict_of(everyone: Sequence[Mapping[str, Any]]) -> UserError | None:
    """The error of all processes, by what each says; None where all did the work and say the same."""
    for index, said in enumerate(everyone):
        if "failed" in said:
            error = _ERRORS.get(said["code"], UserError)(f"process {index} cannot continue: {said['failed']}")
            error.exit_code = said["code"]
            return error
    found = []
    for name in sorted({name for said in everyone for name in said["facts"]}):
        values = [said["facts"].get(name, ("none", "")) for said in everyone]
        index = next((index for index, (value, _) in enumerate(values) if value != values[0][0]), None)
        if index is not None:
            found.append(f"{name}: process 0 has {_shown(*values[0])}, process {index} has {_shown(*values[index])}")
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ConfigError(f"the processes disagree: {'; '.join(found[:_MOST_NAMED])}{more}") if found else None


def _shown(value: str, where: str) -> str:
    value = value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."
    return f"{value} ({where})" if where else value


def leave(code: int) -> None:
    """End this process at once if it is one of several; return if it is the only one.

    An ordinary exit waits for the other processes, and those wait in a collective for the failed one. When it has
    ended, they notice within the heartbeat timeout and end too.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        let_others_end_first()
        os._exit(code)


def let_others_end_first() -> None:
    """Wait on process 0 of several: jax aborts the others as soon as it is gone, and they may have a line to print."""
    import jax

    if jax.process_count() > 1 and jax.process_index() == 0:
        time.sleep(_OTHERS_END_SECONDS)


def is_main_process() -> bool:
    """Whether this is process 0, which alone writes files and prints.

    Example:
        >>> if jt.is_main_process():
        ...     print("written once")
        written once
    """
    import jax

    return jax.process_index() == 0
