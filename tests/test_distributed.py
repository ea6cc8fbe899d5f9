"""What the environment says about the cluster, and where compiled programs are kept."""

import http.server
import os
import threading
from pathlib import Path

import pytest

from jaxtrain.distributed import Cluster, cache_folder, detect_cluster
from jaxtrain.errors import ConfigError

PREFIXES = (
    *("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_", "TPU_", "MEGASCALE_"),
    *("KUBERNETES_", "JOB_COMPLETION_INDEX"),
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

FOUND = {
    "nothing": ({}, None),
    "address": (ADDRESS, Cluster("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", 4, 2)),
    "address comes before Slurm": (
        {**ADDRESS, "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        Cluster("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", 4, 2),
    ),
    "empty address": ({"JAX_COORDINATOR_ADDRESS": ""}, None),
    "Slurm": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Cluster("Slurm")),
    "Slurm, one task": ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
    "Slurm allocation outside srun": ({"SLURM_NTASKS": "8"}, None),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, Cluster("Open MPI")),
    "Open MPI, one process": ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    "TPU slice": ({"TPU_WORKER_HOSTNAMES": "a,b"}, Cluster("TPU slice")),
    "TPU host alone": ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    "TPU slice by address": ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, Cluster("TPU slice")),
    "two TPU slices of one host": (
        {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"},
        Cluster("TPU slice"),
    ),
    "pod of an indexed Job": (POD, Cluster("Kubernetes")),
    "pod of something else": ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    "pod that wants to be alone": ({**POD, "JOB_COMPLETION_INDEX": ""}, None),
    "address in a pod": ({**POD, **ADDRESS}, Cluster("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", 4, 2)),
    "TPU slice in a pod": ({**POD, "TPU_WORKER_HOSTNAMES": "a,b"}, Cluster("TPU slice")),
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
    [(b"a,b", Cluster("TPU slice")), (b"x:0:10.0.0.2", None), (None, None)],
    ids=["several hosts", "one host", "no such attribute"],
)
def test_a_tpu_vm_asks_its_metadata_server(environment, monkeypatch, answer, cluster):
    asked = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path.rpartition("/")[2], self.headers["Metadata-Flavor"]))
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(answer or b"")

        def log_message(self, *words):
            pass

    monkeypatch.setattr("jaxtrain.distributed._has_tpu_chips", lambda: True)
    environment({})
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert detect_cluster() == cluster
    assert asked == [("worker-network-endpoints", "Google")]


WRONG = {
    "no count": (
        {key: value for key, value in ADDRESS.items() if key != "JAX_NUM_PROCESSES"},
        "JAX_COORDINATOR_ADDRESS=10.0.0.1:1234 is set but JAX_NUM_PROCESSES is not; set both or neither",
    ),
    "no index": (
        {key: value for key, value in ADDRESS.items() if key != "JAX_PROCESS_ID"},
        "JAX_COORDINATOR_ADDRESS=10.0.0.1:1234 is set but JAX_PROCESS_ID is not; set both or neither",
    ),
    "count is a word": (
        {**ADDRESS, "JAX_NUM_PROCESSES": "four"},
        "JAX_NUM_PROCESSES is 'four' (environment); it takes a whole number",
    ),
    "negative index": (
        {**ADDRESS, "JAX_PROCESS_ID": "-1"},
        "JAX_PROCESS_ID is '-1' (environment); it takes a whole number",
    ),
    "index beyond the count": (
        {**ADDRESS, "JAX_PROCESS_ID": "4"},
        "JAX_PROCESS_ID is 4 (environment), but JAX_NUM_PROCESSES is 4; processes count from 0 to 3",
    ),
    "no port": (
        {**ADDRESS, "JAX_COORDINATOR_ADDRESS": "10.0.0.1"},
        "JAX_COORDINATOR_ADDRESS=10.0.0.1 (environment) has no port; write host:port",
    ),
    "pod of an indexed Job without the package": (
        POD,
        "this is a pod of an indexed Kubernetes Job (JOB_COMPLETION_INDEX), and finding the others takes a package: "
        "pip install 'jax[k8s]', set JAX_COORDINATOR_ADDRESS, or JOB_COMPLETION_INDEX= to train alone",
    ),
    "Slurm count is a word": (
        {"SLURM_NTASKS": "many"},
        "SLURM_NTASKS is 'many' (environment); it takes a whole number",
    ),
}


@pytest.mark.parametrize(("variables", "message"), WRONG.values(), ids=WRONG)
def test_wrong_environment(environment, variables, message):
    environment(variables)
    with pytest.raises(ConfigError) as caught:
        detect_cluster()
    assert str(caught.value) == message


# setting, environment, folder; the home folder is /home/me
FOLDERS = {
    "null": (None, {}, None),
    "a path": ("/tmp/cache", {"JAXTRAIN_CACHE_DIR": "/elsewhere"}, Path("/tmp/cache")),
    "a path in the home folder": ("~/cache", {}, Path("/home/me/cache")),
    "auto": ("auto", {}, Path("/home/me/.cache/jaxtrain/compiled")),
    "auto, platform folder": ("auto", {"XDG_CACHE_HOME": "/var/me"}, Path("/var/me/jaxtrain/compiled")),
    "auto, replaced": (
        "auto",
        {"JAXTRAIN_CACHE_DIR": "/scratch/me", "XDG_CACHE_HOME": "/var/me"},
        Path("/scratch/me/compiled"),
    ),
}


@pytest.mark.parametrize(("setting", "variables", "folder"), FOLDERS.values(), ids=FOLDERS)
def test_cache_folder(monkeypatch, setting, variables, folder):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("JAXTRAIN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder(setting) == folder
