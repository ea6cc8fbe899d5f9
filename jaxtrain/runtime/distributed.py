"""Starts a process: platform, emulated devices, cluster and compilation cache.

This file and `node_devices` alone read the environment of a cluster. `start` must run before jax uses a device.
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

# A process that is silent for this long counts as failed, and the others end: they cannot continue without it.
_HEARTBEAT_SECONDS = 30
# jax aborts a process, with a stack trace, when others do not join in time; our own limit ends this much earlier.
_ABORT_MARGIN_SECONDS = 60
# The metadata server of Google's machines answers at once; elsewhere there is none.
_METADATA_SECONDS = 3


@dataclass(frozen=True)
class Cluster:
    """How this process joins the other processes of a run.

    Attributes:
        source: Where the cluster was found, for messages.
        coordinator: Address of process 0 as host:port; None: jax detects the rest itself.
        num_processes: Number of processes; None: jax detects it.
        process_id: Number of this process, from 0; None: jax detects it.
    """

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
    """Returns the cluster that the environment describes, or None for a single process.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` come first; then Open MPI, Slurm, TPU slices of
    several hosts and indexed Jobs of Kubernetes, whose details jax reads itself. A Kubernetes Job whose pods train
    independently sets `JOB_COMPLETION_INDEX` to an empty text.

    Raises:
        ConfigError: Only some of the three variables are set, or one is not a number; `srun` did not start this process
            of a Slurm job; Open MPI does not give the address of its first process; or the package with which jax
            asks Kubernetes is not installed.
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
    # Open MPI comes before Slurm, because mpirun also works inside Slurm jobs.
    if (_number("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in os.environ:
            raise ConfigError(
                "this Open MPI does not say where its first process is (OMPI_MCA_orte_hnp_uri; version 5 dropped it); "
                "set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE and "
                "JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK in each process, or use Slurm's srun"
            )
        return Cluster("Open MPI")
    # A batch job that asks only for nodes has no number of tasks; srun then starts one per node.
    tasks = _number("SLURM_NTASKS") or _number("SLURM_JOB_NUM_NODES") or 1
    if tasks > 1 and "SLURM_PROCID" in os.environ:
        # A batch script is not a Slurm step; the shell that salloc may open is a step of a single task.
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
    """Returns whether this machine has a GPU or TPU that jax may use, without importing jax."""
    return os.environ.get("JAX_PLATFORMS", "") != "cpu" and (_has_nvidia_driver() or _has_tpu_chips())


def _tpu_vm_workers() -> str:
    """Returns the hosts of this Cloud TPU VM's slice, separated by commas; an empty text on other machines."""
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
    """Returns the folder of the compilation cache, or None where programs are not cached.

    Args:
        setting: The value of `compilation_cache`: a path, None, or "auto", which is `JAXTRAIN_CACHE_DIR` if that is
            set, else the user's cache folder.
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


# The fraction of a GPU's memory that jax allocates. Its default, 0.75, leaves 20 GiB of an H100 unused; NCCL, cuBLAS
# and CUDA's context need a few GiB. If the user sets XLA_PYTHON_CLIENT_MEM_FRACTION, that value is used.
GPU_MEMORY_FRACTION = 0.92


def start(*, emulate: int | None = None, compilation_cache: str | None = "auto") -> None:
    """Prepares jax: emulated devices, compilation cache and, where a cluster is detected, `jax.distributed`.

    If other processes do not join in time, this process ends with one line and exit code 2, before jax would abort it.

    Args:
        emulate: Number of emulated CPU devices in this process; None: the real devices.
        compilation_cache: "auto", a path or None, as for `cache_folder`.

    Raises:
        ConfigError: Emulation is asked for after jax has started, the cache folder cannot be made, or the cluster
            cannot be joined.
    """
    import jax

    # jax reads it when it first uses a GPU.
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
            # Compiled programs are executed without a check, so that no other user may write there.
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
                # All is known, and jax's detection inside a Slurm job would hide GPUs.
                cluster_detection_method="deactivate",
                # The coordinator has no authentication, so it listens on its own address only.
                coordinator_bind_address=cluster.coordinator if cluster.process_id == 0 else None,
                **limits,
            )
    except Exception as error:
        raise ConfigError(failure((str(error).splitlines() or [type(error).__name__])[0][:200])) from error
    finally:
        timer.cancel()


def describe_devices() -> str:
    """Returns the devices of the run for the banner: their number and kind, and the number of processes."""
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind
    text = f"{len(devices)} x {kind}" if kind.lower() != devices[0].platform else f"{len(devices)} x {kind.upper()}"
    if jax.process_count() > 1:
        text += f" over {jax.process_count()} processes"
    return text


def unused_accelerator(platform: str) -> str | None:
    """Returns a line that says how to use an NVIDIA card that jax does not see, or None where there is none.

    Args:
        platform: The platform that jax runs on, such as "cpu".
    """
    asked = os.environ.get("JAX_PLATFORMS", "")
    if platform == "cpu" and asked != "cpu" and _has_nvidia_driver():
        return "there is an NVIDIA card, but jax runs on the CPU: pip install 'jaxtrain[cuda12]' (or cuda13)"
    return None


@contextlib.contextmanager
def on_main_process(resource: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enters a context on process 0 on behalf of all processes; if that fails, every process raises.

    Args:
        resource: The context, which only process 0 enters and leaves.

    Raises:
        UserError: On process 0, the error of the context.
        ConfigError: On the other processes.
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
    """Ends this process at once if it is one of several; returns if it is the only one.

    An ordinary exit waits for the other processes, and those wait in a collective for the failed one. When it has
    ended, they notice within the heartbeat timeout and end too.

    Args:
        code: Exit code.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_main_process() -> bool:
    """Returns whether this is process 0, which alone writes files and prints."""
    import jax

    return jax.process_index() == 0
