"""What the environment says about the cluster, and where compiled programs are kept."""

import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading

import jax
import pytest

from jaxtrain.errors import ConfigError, UserError
from jaxtrain.runtime import distributed
from jaxtrain.runtime.cluster import Cluster, detect_cluster
from jaxtrain.runtime.compiler import use_cache

PREFIXES = (
    *("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_"),
    *("KUBERNETES_", "JOB_COMPLETION_INDEX", "JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE", "ROCR_VISIBLE", "HIP_VISIBLE"),
)


@pytest.fixture
def environment(monkeypatch):
    """A function that sets exactly these of the variables that describe a cluster."""

    def put(variables):
        for name in [name for name in os.environ if name.startswith(PREFIXES)]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
# What Slurm sets in a batch script, and what srun sets in each of its processes on top.
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **SBATCH,
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "1(x8)",
}
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}

BY_ADDRESS = Cluster("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", 4, 2)
FOUND = {
    "nothing": ({}, None),
    "address comes before Slurm": ({**ADDRESS, **SBATCH}, BY_ADDRESS),
    "Slurm": (SRUN, Cluster("Slurm")),
    "mpirun in a batch script": ({**SBATCH, **MPIRUN}, Cluster("Open MPI")),
    "Open MPI": (MPIRUN, Cluster("Open MPI")),
    "TPU slice": ({"TPU_WORKER_HOSTNAMES": "a,b"}, Cluster("TPU slice")),
    "pod of an indexed Job": (POD, Cluster("Kubernetes")),
}


@pytest.fixture
def kubernetes_package(monkeypatch, tmp_path):
    """A stand-in for the package through which jax asks Kubernetes; jax takes no notice of pods without it."""
    (tmp_path / "kubernetes.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("variables", "cluster"), FOUND.values(), ids=FOUND)
def test_detect_cluster(environment, kubernetes_package, variables, cluster):
    environment(variables)
    assert detect_cluster() == cluster


@pytest.mark.parametrize(
    ("answer", "cluster"),
    [(b"a,b", Cluster("TPU slice")), (None, None)],
    ids=["several hosts", "no such attribute"],
)
def test_a_tpu_vm_asks_its_metadata_server(environment, monkeypatch, answer, cluster):
    asked = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path.rpartition("/")[2], self.headers["Metadata-Flavor"]))
            self.send_response(404 if answer is None else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write(answer or b"")

        def log_message(self, *words):
            pass

    monkeypatch.setattr("jaxtrain.runtime.cluster.has_tpu_chips", lambda: True)
    environment({})
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert detect_cluster() == cluster
    assert asked == [("worker-network-endpoints", "Google")]


NO_SRUN = "this Slurm job has 8 tasks (SLURM_NTASKS), but srun did not start this process"
UNCOUNTED = {key: value for key, value in ADDRESS.items() if key != "JAX_NUM_PROCESSES"}
# id: (variables, beginning of the line)
WRONG = {
    "no count": (UNCOUNTED, "JAX_COORDINATOR_ADDRESS=10.0.0.1:1234 is set but JAX_NUM_PROCESSES is not"),
    "index beyond the count": (
        {**ADDRESS, "JAX_PROCESS_ID": "4"},
        "JAX_PROCESS_ID is 4 (environment), but JAX_NUM_PRO",
    ),
    "pod without the package": (POD, "this is a pod of an indexed Kubernetes Job (JOB_COMPLETION_INDEX), and finding"),
    "a shell of salloc": ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, NO_SRUN),
}


@pytest.mark.parametrize(("variables", "message"), WRONG.values(), ids=WRONG)
def test_wrong_environment(environment, monkeypatch, variables, message):
    environment(variables)
    find_spec = importlib.util.find_spec  # the extra `dev` has the package of Kubernetes, and users have it not
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kubernetes" else find_spec(name))
    with pytest.raises(ConfigError) as caught:
        detect_cluster()
    assert str(caught.value).startswith(message)


# A job of a single process, so that jax joins by itself and at once; its place on the node is the case's.
ALONE = {**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
TWO = {**ALONE, "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_LOCALID": "1"}
EIGHT = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
ALONE_BY_MPI = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}
AT_ADDRESS = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:PORT", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}

# environment, what jax lets this process see
VISIBLE = {
    "Slurm, a process per node": (ALONE, "all"),
    "Slurm, two per node": (TWO, "1"),
    "Slurm, two per node, each with half of the GPUs": ({**TWO, **EIGHT}, "4,5,6,7"),
    "address": (AT_ADDRESS, "all"),
}

# jax joins before it first uses a device, so all cases fit into one process; without a device, none of them is a GPU.
JOIN = """
import json, os, socket, sys
import jax
from jaxtrain.runtime import distributed
from jaxtrain.runtime.cluster import Cluster, detect_cluster

found = []
for variables in json.load(sys.stdin):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {name: value.replace("PORT", port) for name, value in variables.items()}
    os.environ.update(variables, JAX_COORDINATOR_PORT=port)
    source = "Open MPI" if "OMPI_COMM_WORLD_SIZE" in variables else "Slurm"
    distributed._join(detect_cluster() or Cluster(source), None)
    found.append(jax.config.read("jax_cuda_visible_devices"))
    jax.distributed.shutdown()
    jax.config.update("jax_cuda_visible_devices", "all")
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""


def test_a_process_sees_its_share_of_the_devices_of_its_node(environment):
    environment({})
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        input=json.dumps([variables for variables, _ in VISIBLE.values()]),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(VISIBLE, json.loads(done.stdout), strict=True))
    assert found == {name: visible for name, (_, visible) in VISIBLE.items()}


def test_pods_that_do_not_meet_are_no_mistake_in_the_config(monkeypatch):
    """Exit code 2 ends a job of Kubernetes for good."""

    def fail(*args: object, **settings: object) -> None:
        raise RuntimeError("Retry failed with all attempts exhausted")

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr("jax.distributed.initialize", fail)
    with pytest.raises(UserError, match="found through Kubernetes: Retry failed") as caught:
        distributed._join(Cluster("Kubernetes"), None)
    assert caught.value.exit_code == 70


def test_a_home_without_a_cache_keeps_nobody_from_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").write_text("a file, below which no folder can be made")
    monkeypatch.delenv("JAXTRAIN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = jax.config.jax_compilation_cache_dir
    use_cache("auto")
    assert jax.config.jax_compilation_cache_dir == before
    said = capsys.readouterr().err
    assert "programs are compiled, but not cached" in said
    assert said.count("\n") == 1
    with pytest.raises(ConfigError, match=r"the compilation cache .* cannot be used"):
        use_cache(str(tmp_path / "home" / "chosen"))
