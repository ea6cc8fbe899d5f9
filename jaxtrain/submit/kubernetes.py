"""What a training on Kubernetes is given, and the objects that a Job needs around it. No jax here."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.config.arguments import refusal
from jaxtrain.config.secrets import names_secret, redacted_text
from jaxtrain.errors import ConfigError
from jaxtrain.submit import names
from jaxtrain.submit.tpu_slices import TpuSlice

# A piece of a manifest: what PyYAML writes.
Manifest = dict[str, Any]

# The replicated job of a JobSet; its pods are called <name>-<this>-0-<number>.
REPLICATED_JOB = "hosts"
# Where the file of a config is mounted.
CONFIG_FOLDER = "/etc/jaxtrain"
# What Kubernetes appends to the name of a pod, after its number.
_RANDOM_SUFFIX = "-xxxxx"
_MOST_NAME = 63
_MOST_CONFIG_BYTES = 1_000_000


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim, and where the pods find it."""

    claim: str
    path: str


@dataclass(frozen=True)
class KubernetesRun:
    """A training on Kubernetes, as `submit job` and `submit jobset` write it; all values were checked.

    Attributes:
        name: Name of the Job or JobSet, and of what belongs to it.
        image: Container image with jaxtrain.
        words: Arguments of `jaxtrain`, the same in every pod.
        hosts: Number of pods, one per machine.
        namespace: Namespace of all objects.
        gpus: NVIDIA GPUs per pod; None: no GPUs.
        tpu: The slice whose hosts the pods run on; None: no TPU.
        cpus: CPUs per pod; None: not asked for.
        memory: Memory per pod; None: not asked for.
        queue: Local queue of Kueue that admits the run; None: no queue.
        grace_seconds: Time between the signal that ends a pod and its kill.
        restarts: How often the run is started again after a failure.
        volumes: Claims that every pod mounts.
        environment: Environment variables of every pod.
        secrets: Secrets whose keys become environment variables.
        service_account: An account that exists; None: one of its own.
        config_file: Name and text of the config where it is no shipped one.
    """

    name: str
    image: str
    words: tuple[str, ...]
    hosts: int
    namespace: str = "default"
    gpus: int | None = None
    tpu: TpuSlice | None = None
    cpus: str | None = None
    memory: str | None = None
    queue: str | None = None
    grace_seconds: int = 600
    restarts: int = 3
    volumes: tuple[Volume, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    service_account: str | None = None
    config_file: tuple[str, str] | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all pods together."""
        if self.tpu is not None:
            return self.tpu.num_devices
        emulated = self.environment.get("JAX_NUM_CPU_DEVICES", "1")
        return self.hosts * (self.gpus or (int(emulated) if emulated.isdigit() else 1))


def most_name_length(hosts: int, *, jobset: bool) -> int:
    """Returns how long the name of a run may be: names of its pods have at most 63 characters."""
    number = f"-{hosts - 1}{_RANDOM_SUFFIX}"
    return _MOST_NAME - len(f"-{REPLICATED_JOB}-0{number}" if jobset else number)


def parse_volumes(texts: Iterable[str]) -> tuple[Volume, ...]:
    """Reads CLAIM:PATH texts.

    Raises:
        ConfigError: A text of another form, a claim or path that cannot be, or a path that stands twice.
    """
    found: list[Volume] = []
    for text in texts:
        claim, colon, path = text.partition(":")
        if not colon:
            raise ConfigError(refusal("--volume", "CLAIM:PATH", text, "--volume runs:/runs"))
        names.check_subdomain(claim, option="--volume (claim)", write="--volume runs:/runs")
        path = names.check_path(path, option="--volume (path)")
        taken = [CONFIG_FOLDER, "/dev/shm", *(other.path for other in found)]
        if path in taken:
            raise ConfigError(f"--volume {text}: {path} is mounted already; choose another path for the claim {claim}")
        found.append(Volume(claim, path))
    return tuple(found)


def parse_environment(texts: Iterable[str]) -> dict[str, str]:
    """Reads NAME=VALUE texts.

    Raises:
        ConfigError: A text of another form, or a secret, which a manifest would show.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(refusal("--env", "NAME=VALUE", text.partition("=")[0], "--env NCCL_DEBUG=WARN"))
        # Google's libraries take a path by this name, such as that of a mounted Secret.
        is_path = name == "GOOGLE_APPLICATION_CREDENTIALS" and value.startswith("/")
        if (names_secret(name) and not is_path) or redacted_text(value) != value:
            raise ConfigError(
                f"--env {name}: a manifest shows its values to all who may read it; put {name} into a Secret of the "
                "cluster and write --secret NAME-OF-THE-SECRET"
            )
        found[name] = value
    return found


def check_config_file(name: str, text: str) -> tuple[str, str]:
    """Returns the name and text of a config that a ConfigMap carries into the pods.

    Raises:
        ConfigError: It is too large for one.
    """
    if len(text.encode()) > _MOST_CONFIG_BYTES:
        raise ConfigError(
            f"{name} has more than {_MOST_CONFIG_BYTES} bytes, which no ConfigMap takes; put it into the image"
        )
    # Keys of a ConfigMap take no other characters.
    return re.sub(r"[^-._a-zA-Z0-9]", "-", name), text


def metadata(run: KubernetesRun, *, queue: bool = False) -> Manifest:
    """Returns the metadata of an object that belongs to a run."""
    labels = {"app.kubernetes.io/name": "jaxtrain", "app.kubernetes.io/instance": run.name}
    if queue and run.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = run.queue
    return {"name": run.name, "namespace": run.namespace, "labels": labels}


def config_map_name(run: KubernetesRun) -> str:
    """Returns the name of the ConfigMap: one for each text, so that a job that runs keeps the config it began with."""
    text = "" if run.config_file is None else run.config_file[1]
    return f"{run.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def config_map(run: KubernetesRun) -> list[Manifest]:
    """Returns the object that carries a config which is no shipped one; none where it is."""
    if run.config_file is None:
        return []
    name, text = run.config_file
    named = {**metadata(run), "name": config_map_name(run)}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "immutable": True, "data": {name: text}}]


def access(run: KubernetesRun) -> list[Manifest]:
    """Returns the account of the pods and its right to read what tells a process which others there are.

    jax reads the pod by its address and then its job (jax/_src/clusters/k8s_cluster.py, 0.10.2). A run of one pod reads
    nothing, and gets no right.
    """
    if run.hosts == 1:
        return []
    account = run.service_account or run.name
    kinds = [] if run.service_account else [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(run)}]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
    ]
    api = "rbac.authorization.k8s.io"
    return [
        *kinds,
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata(run), "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(run),
            "roleRef": {"apiGroup": api, "kind": "Role", "name": run.name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": run.namespace}],
        },
    ]
