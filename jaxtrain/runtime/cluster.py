"""What surrounds this process: its cluster, and its place on its node. No jax here.

The only reader of cluster environment. Nothing is joined here.
"""

import importlib.util
import os
import re
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.runtime.devices import has_tpu_chips

# Google's machines answer at once; elsewhere nobody does.
_METADATA_SECONDS = 3
_METADATA_HOST = "metadata.google.internal"
# The variables with which the runtimes of NVIDIA and AMD, and Slurm through them, list the GPUs of a process.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Cluster:
    """How this process joins others: by explicit address, or, where that is None, by jax's own detection."""

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def environment_number(name: str) -> int | None:
    """A whole number from the environment; None where the variable is not set, a ConfigError where it is none."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} (environment); it takes a whole number")
    return int(text)


def in_pod() -> bool:
    """Whether this process runs in a pod of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def detect_cluster() -> Cluster | None:
    """The cluster that the environment describes, or None for a single process.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` come first; then Open MPI, Slurm, TPU slices of
    several hosts and indexed Jobs of Kubernetes, whose details jax reads itself.

    Raises:
        ConfigError: it describes one that cannot be joined.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        return _at_address(address)
    # Before Slurm, inside whose jobs mpirun works too.
    if (environment_number("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return Cluster("Open MPI")
    # A batch job that asks for nodes only has no count of tasks; srun starts one per node.
    tasks = environment_number("SLURM_NTASKS") or environment_number("SLURM_JOB_NUM_NODES") or 1
    if tasks > 1 and "SLURM_PROCID" in os.environ:
        # A batch script is no step; the shell that salloc may open is one, of a single task.
        if "SLURM_STEP_NODELIST" not in os.environ or (environment_number("SLURM_STEP_NUM_TASKS") or tasks) < tasks:
            raise ConfigError(
                f"this Slurm job has {tasks} tasks (SLURM_NTASKS), but srun did not start this process: write 'srun' "
                "before the command, as in: srun jaxtrain train CONFIG; or set SLURM_NTASKS=1 to run it alone"
            )
        return Cluster("Slurm")
    workers = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or _tpu_vm_workers()
    if "," in workers or (environment_number("MEGASCALE_NUM_SLICES") or 1) > 1:
        return Cluster("TPU slice")
    if in_pod() and os.environ.get("JOB_COMPLETION_INDEX"):
        if importlib.util.find_spec("kubernetes") is None:
            raise ConfigError(
                "this is a pod of an indexed Kubernetes Job (JOB_COMPLETION_INDEX), and finding the others takes a "
                "package: pip install 'jax[k8s]', set JAX_COORDINATOR_ADDRESS, or JOB_COMPLETION_INDEX= to train alone"
            )
        return Cluster("Kubernetes")
    return None


def _at_address(address: str) -> Cluster:
    processes, index = environment_number("JAX_NUM_PROCESSES"), environment_number("JAX_PROCESS_ID")
    if processes is None or index is None:
        missing = "JAX_NUM_PROCESSES" if processes is None else "JAX_PROCESS_ID"
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address} is set but {missing} is not; set both or neither")
    if ":" not in address:
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address} (environment) has no port; write host:port")
    if index >= processes:
        raise ConfigError(f"JAX_PROCESS_ID is {index} (environment), but JAX_NUM_PROCESSES is {processes}")
    return Cluster("JAX_COORDINATOR_ADDRESS", address, processes, index)


def _tpu_vm_workers() -> str:
    """The hosts of the slice that this Cloud TPU VM belongs to, divided by commas; empty anywhere else."""
    if not has_tpu_chips() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return ""
    host = os.environ.get("GCE_METADATA_IP", _METADATA_HOST)
    return _ask_metadata(host, "attributes/worker-network-endpoints") or ""


def local_device_ids() -> list[int] | None:
    """The numbers of this process's GPUs among those that it sees; []: all of them; None: those that jax chooses.

    By itself jax gives every process of Slurm or Open MPI one GPU, by the number of the process on the node: correct
    with one process per GPU, but with one process per node it hides all GPUs except the first.
    """
    # Open MPI comes first, as in jax: under Slurm each of its daemons is a task that starts several processes.
    index, processes = (environment_number(f"OMPI_COMM_WORLD_LOCAL_{name}") for name in ("RANK", "SIZE"))
    if index is None or processes is None:
        index, processes = environment_number("SLURM_LOCALID"), _slurm_tasks_on_node()
    if os.environ.get("JAX_LOCAL_DEVICE_IDS") or index is None or processes is None:
        return None
    if processes == 1:
        return []
    shown = next((os.environ[name] for name in _VISIBLE if os.environ.get(name)), None)
    visible, on_node = None if shown is None else len(shown.split(",")), environment_number("SLURM_GPUS_ON_NODE")
    is_bound = bool(os.environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    if visible is not None and (visible < processes or visible < (on_node or 0) or is_bound):
        return []  # each process sees only its own GPUs, numbered from 0
    share = max((visible or on_node or processes) // processes, 1)
    return list(range(index * share, (index + 1) * share))


def _slurm_tasks_on_node() -> int | None:
    """The tasks of a Slurm step on each node, where all have as many: "2(x4)" is 2 tasks on each of four nodes."""
    found = re.fullmatch(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip())
    return None if found is None else int(found[1])


def _ask_metadata(host: str, name: str) -> str | None:
    """A value of the metadata server; None: no answer."""
    # Here, because it imports ssl, http and email, which a process elsewhere has no use for.
    import http.client
    import urllib.request

    address = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    # The server is on the link of this machine: a proxy of the environment does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as answer:
            is_google = answer.headers.get("Metadata-Flavor") == "Google"
            return answer.read(65_536).decode("utf-8", errors="replace").strip() if is_google else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
