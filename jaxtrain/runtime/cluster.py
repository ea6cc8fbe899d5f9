"""The cluster that this process belongs to, read from its environment. Nothing is joined here; no jax here.

The only reader of cluster environment, with `node_devices`.
"""

import importlib.util
import os
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.runtime.accelerators import has_tpu_chips

# Google's machines answer at once; elsewhere nobody does.
_METADATA_SECONDS = 3


@dataclass(frozen=True)
class Cluster:
    """How this process joins others: by explicit address, or, where that is None, by jax's own detection."""

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def environment_number(name: str) -> int | None:
    """A whole number from the environment; None where the variable is not set.

    Raises:
        ConfigError: it is no whole number.
    """
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
    several hosts and indexed Jobs of Kubernetes, whose details jax reads itself. A Kubernetes Job whose pods work on
    their own sets `JOB_COMPLETION_INDEX` to nothing.

    Raises:
        ConfigError: the three variables are only partly set, or not numbers; a process in a Slurm job that `srun` did
            not start; an Open MPI that does not say where the others are; a Job without the package that jax asks
            Kubernetes with.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address:
        processes, index = environment_number("JAX_NUM_PROCESSES"), environment_number("JAX_PROCESS_ID")
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
    if (environment_number("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in os.environ:
            raise ConfigError(
                "this Open MPI does not say where its first process is (OMPI_MCA_orte_hnp_uri; version 5 dropped it); "
                "set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE and "
                "JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK in each process, or use Slurm's srun"
            )
        return Cluster("Open MPI")
    # A batch job that asks for nodes only has no count of tasks; srun starts one per node.
    tasks = environment_number("SLURM_NTASKS") or environment_number("SLURM_JOB_NUM_NODES") or 1
    if tasks > 1 and "SLURM_PROCID" in os.environ:
        # A batch script is no step; the shell that salloc may open is one, of a single task.
        if "SLURM_STEP_NODELIST" not in os.environ or (environment_number("SLURM_STEP_NUM_TASKS") or tasks) < tasks:
            raise ConfigError(
                f"this Slurm job has {tasks} tasks (SLURM_NTASKS), but srun did not start this process, so the others "
                "do not run: write 'srun' before the command, as in: srun jaxtrain train CONFIG; or set SLURM_NTASKS=1 "
                "to run it alone"
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


def _tpu_vm_workers() -> str:
    """The hosts of the slice that this Cloud TPU VM belongs to, divided by commas; empty anywhere else."""
    if not has_tpu_chips() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return ""
    # Here, because it imports ssl, http and email, which no other process has a use for.
    import urllib.request

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
