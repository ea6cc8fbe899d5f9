"""Process start-up: platform, emulated devices, the cluster, the compilation cache.

The only reader of cluster environment, with `node_devices`. Everything here must run before jax touches a device.
"""

import contextlib
import importlib.util
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.runtime.node_devices import local_device_ids
from jaxtrain.runtime.remarks import print_remark

# How long a process may be silent before the others give up; they cannot go on without it.
_HEARTBEAT_SECONDS = 30
# jax aborts the process, with a stack trace, when others do not join in time; ours is the first to give up.
_ABORT_MARGIN_SECONDS = 60
# Google's machines answer at once; elsewhere nobody does.
_METADATA_SECONDS = 3


@dataclass(frozen=True)
class Cluster:
    """How this process joins others: by explicit address, or, where that is None, by jax's own detection."""

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} (environment); it takes a whole number")
    return int(text)


def detect_cluster() -> Cluster | None:
    """The cluster that the environment describes, or None for a single process.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` come first; then Open MPI, Slurm, TPU slices of
    several hosts and indexed Jobs of Kubernetes, whose details jax reads itself. A Kubernetes Job whose pods work on
    their own sets `JOB_COMPLETION_INDEX` to nothing.

    Raises:
        ConfigError: the three variables are only partly set, or not numbers; a process in a Slurm job that `srun` did
            not start; an Open MPI that does not say where the others are; a Job without the package that jax asks
            Kubernetes with.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        processes, index = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
        if processes is None or index is None:
            missing = "JAX_NUM_PROCESSES" if processes is None else "JAX_PROCESS_ID"
            raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address} is set but {missing} is not; set both or neither")
        if ":" not in address:
            raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address} (environment) has no port; write host:port")
        if index >= processes:
            counted = f"processes count from 0 to {processes - 1}" if processes else "use 1 or more"
            raise ConfigError(
                f"JAX_PROCESS_ID is {index} (environment), but JAX_NUM_PROCESSES is {processes}; {counted}"
            )
        return Cluster("JAX_COORDINATOR_ADDRESS", address, processes, index)
    # Before Slurm, inside whose jobs mpirun works too.
    if (_number("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in os.environ:
            raise ConfigError(
                "this Open MPI does not say where its first process is (OMPI_MCA_orte_hnp_uri; version 5 dropped it); "
                "set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE and "
                "JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK in each process, or use Slurm's srun"
            )
        return Cluster("Open MPI")
    # A batch job that asks for nodes only has no count of tasks; srun starts one per node.
    tasks = _number("SLURM_NTASKS") or _number("SLURM_JOB_NUM_NODES") or 1
    if tasks > 1 and "SLURM_PROCID" in os.environ:
        # A batch script is no step; the shell that salloc may open is one, of a single task.
        if "SLURM_STEP_NODELIST" not in os.environ or (_number("SLURM_STEP_NUM_TASKS") or tasks) < tasks:
            raise ConfigError(
                f"this Slurm job has {tasks} tasks (SLURM_NTASKS), but srun did not start this process, so the others "
                "do not run: write 'srun' before the command, as in: srun jaxtrain train CONFIG; or set SLURM_NTASKS=1 "
                "to run it alone"
            )
        return Cluster("Slurm")
    workers = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or _tpu_vm_workers()
    if "," in workers or (_number("MEGASCALE_NUM_SLICES") or 1) > 1:
        return Cluster("TPU slice")
    if "KUBERNETES_SERVICE_HOST" in os.environ and os.environ.get("JOB_COMPLETION_INDEX"):
        if importlib.util.find_spec("kubernetes") is None:
            raise ConfigError(
                "this is a pod of an indexed Kubernetes Job (JOB_COMPLETION_INDEX), and finding the others takes a "
                "package: pip install 'jax[k8s]', set JAX_COORDINATOR_ADDRESS, or JOB_COMPLETION_INDEX= to train alone"
            )
        return Cluster("Kubernetes")
    return None


def _has_tpu_chips() -> bool:
    return Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def has_accelerator() -> bool:
    """Whether this machine has a GPU or TPU that the environment does not keep jax from; without importing jax."""
    return os.environ.get("JAX_PLATFORMS", "") != "cpu" and (_has_nvidia_driver() or _has_tpu_chips())


def _tpu_vm_workers() -> str:
    """The hosts of the slice that this Cloud TPU VM belongs to, divided by commas; empty anywhere else."""
    if not _has_tpu_chips() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return ""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def cache_folder(setting: str | None) -> Path | None:
    """Folder of compiled programs for `compilation_cache`: auto, a path, or None.

    `JAXTRAIN_CACHE_DIR` replaces the platform's cache folder under auto.
    """
    if setting is None:
        return None
    if setting != "auto":
        return local_path(setting, what="compilation_cache").expanduser()
    root = os.environ.get("JAXTRAIN_CACHE_DIR")
    if root:
        return local_path(root, what="JAXTRAIN_CACHE_DIR").expanduser() / "compiled"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).expanduser() / "jaxtrain" / "compiled"


# Of a GPU's memory, what jax takes for itself: its own default, 0.75, leaves 20 GiB of an H100 idle. NCCL, cuBLAS and
# CUDA's context need a few GiB. XLA_PYTHON_CLIENT_MEM_FRACTION, where it is set, says otherwise.
GPU_MEMORY_FRACTION = 0.92


def start(*, emulate: int | None = None, compilation_cache: str | None = "auto") -> None:
    """Prepare jax: emulated devices, cache and, where a cluster is detected, `jax.distributed`.

    Args:
        emulate: pretend to have this many CPU devices (in each process); None: the real devices.
        compilation_cache: see `cache_folder`.

    Raises:
        ConfigError: emulation asked for after jax has started, a cache folder that cannot be made, or a cluster that
            cannot be joined.

    Where other processes do not join in time, the process ends with one line and exit code 2: jax would abort it.
    """
    import jax

    # Read when jax first uses a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    if emulate is not None:
        if emulate < 1:
            raise ConfigError(f"--emulate {emulate}: use 1 or more devices")
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", emulate)
        except RuntimeError:
            raise ConfigError("devices can be emulated only before jax is first used in a process") from None
    folder = cache_folder(compilation_cache)
    if folder is not None:
        try:
            # Compiled programs are run as they are read: nobody else may write there.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the compilation cache {folder}: {error.strerror}; "
                "set compilation_cache=null or another folder"
            ) from None
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    cluster = detect_cluster()
    if cluster is not None and not jax.distributed.is_initialized():
        _join(cluster)


def _join(cluster: Cluster) -> None:
    import jax

    timeout = _number("JAXTRAIN_JOIN_TIMEOUT_SECONDS") or 300

    def failure(reason: str, waited: str = "") -> str:
        return (
            f"could not join the cluster found through {cluster.source}{waited}: {reason}; check that all "
            "processes started, and the address"
        )

    def give_up() -> None:
        where = f" at {cluster.coordinator}" if cluster.coordinator else ""
        count = f"the {cluster.num_processes}" if cluster.num_processes else "its"
        line = failure(f"{count} processes did not meet{where}", f" within {timeout} s")
        print_remark(f"jaxtrain: {line}")
        os._exit(ConfigError.exit_code)

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    limits: dict[str, Any] = {
        "initialization_timeout": timeout + _ABORT_MARGIN_SECONDS,
        "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS,
        "local_device_ids": local_device_ids(),
    }
    try:
        if cluster.coordinator is None:
            jax.distributed.initialize(**limits)
        else:
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.num_processes,
                cluster.process_id,
                # Nothing is left to detect, and a Slurm job around it would hide GPUs.
                cluster_detection_method="deactivate",
                # Bound to its own address only: the coordinator has no authentication.
                coordinator_bind_address=cluster.coordinator if cluster.process_id == 0 else None,
                **limits,
            )
    except Exception as error:
        raise ConfigError(failure((str(error).splitlines() or [type(error).__name__])[0][:200])) from error
    finally:
        timer.cancel()


def describe_devices() -> str:
    """One line for the banner: platform, kind and count; names a GPU that jax does not use."""
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    text = f"{len(devices)} x {kind}" if kind.lower() != devices[0].platform else f"{len(devices)} x {kind.upper()}"
    if jax.process_count() > 1:
        text += f" over {jax.process_count()} processes"
    return text


def unused_accelerator(platform: str) -> str | None:
    """The line that mends a machine whose NVIDIA card jax does not see; None where there is nothing to mend."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if platform == "cpu" and asked != "cpu" and _has_nvidia_driver():
        return "there is an NVIDIA card, but jax runs on the CPU: pip install 'jaxtrain[cuda12]' (or cuda13)"
    return None


@contextlib.contextmanager
def on_main_process(resource: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a context on process 0 for all processes; where it cannot be entered, every process raises.

    Raises:
        ConfigError: process 0 could not enter it; its own error says why.
    """
    import jax

    if jax.process_count() == 1:
        with resource:
            yield
        return
    import numpy as np
    from jax.experimental import multihost_utils

    with contextlib.ExitStack() as stack:
        failure: UserError | None = None
        if is_main_process():
            try:
                stack.enter_context(resource)
            except UserError as error:
                failure = error
        if not multihost_utils.broadcast_one_to_all(np.int32(failure is None)):
            raise failure or ConfigError("process 0 could not start the run; its message says why")
        yield


def leave(code: int) -> None:
    """End this process at once when it is one of several; return when it is alone.

    An ordinary exit waits for the other processes, and those wait in a collective for the one that failed. Gone, it is
    missed within the heartbeat timeout, and they end too.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_main_process() -> bool:
    """Whether this process writes files and talks to people."""
    import jax

    return jax.process_index() == 0
