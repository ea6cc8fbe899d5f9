"""A training as a Kubernetes Job or as a JobSet, and the objects that it needs around it. No jax here.

One Job has all hosts as its pods: jax counts the processes of a cluster by `parallelism` of the job that a pod belongs
to, so that a JobSet with two replicas would be two clusters that train beside each other.
"""

import hashlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.config.secrets import names_secret, redacted_text
from jaxtrain.errors import ConfigError, DataError, DivergedError, PreemptedError, UserError
from jaxtrain.submit.tpu import TpuSlice
from jaxtrain.submit.training import CONFIG_FOLDER

# A piece of a manifest: what PyYAML writes.
Manifest = dict[str, Any]

# The replicated job of a JobSet; its pods are called <name>-<this>-0-<number>.
_REPLICATED_JOB = "hosts"
# Name of the container that trains.
_CONTAINER = "train"
# The group of the user of the images in containers/: it may write to the volumes.
_GROUP = 1000
# Nodes are added, and images are pulled, in minutes rather than seconds; the usual limit is 300.
_JOIN_SECONDS = 1800
# Ends once every name has an address. Pods get theirs at different times, and jax itself waits for about a minute.
_WAIT = """\
import socket, sys, time
end = time.monotonic() + float(sys.argv[1])
while True:
    try:
        print(sys.argv[2], socket.gethostbyname(sys.argv[2]))
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"{sys.argv[2]} has no address after {sys.argv[1]} s: {error}")
        time.sleep(2)
"""


class ClusterError(UserError):
    """A cluster could not be reached, or refused what it was given (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class KubernetesRun:
    """A training on Kubernetes, as `submit job` and `submit jobset` write it.

    Attributes:
        name: name of the Job or JobSet, and of what belongs to it.
        image: container image with jaxtrain.
        words: arguments of `jaxtrain`, the same in every pod.
        hosts: number of pods, one per machine.
        namespace: namespace of all objects.
        gpus: NVIDIA GPUs per pod; None: no GPUs.
        tpu: the slice whose hosts the pods run on; None: no TPU.
        cpus: CPUs per pod; None: not asked for.
        memory: memory per pod; None: not asked for.
        queue: local queue of Kueue that admits the run; None: no queue.
        grace_seconds: time between the signal that ends a pod and its kill.
        restarts: how often the run is started again after a failure.
        volumes: path -> persistent volume claim that every pod mounts there.
        environment: environment variables of every pod.
        secrets: Secrets whose keys become environment variables.
        service_account: an account that exists; None: one of its own.
        config_file: name and text of the config where it is no shipped one.
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
    volumes: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    service_account: str | None = None
    config_file: tuple[str, str] | None = None

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap: one for each text, so that a job that runs keeps the config it began with."""
        text = "" if self.config_file is None else self.config_file[1]
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def parse_volumes(texts: Iterable[str]) -> dict[str, str]:
    """Read CLAIM:PATH texts as path -> claim.

    Raises:
        ConfigError: a text of another form.
    """
    found = {}
    for text in texts:
        claim, _, path = text.partition(":")
        if not claim or not path.startswith("/") or not path.strip("/"):
            raise ConfigError(f"--volume takes CLAIM:PATH, not {text!r}; write --volume runs:/runs")
        found[path.rstrip("/")] = claim
    return found


def parse_environment(texts: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE texts.

    Raises:
        ConfigError: a text of another form, or a secret, which a manifest would show.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env takes NAME=VALUE, not {name!r}; write --env NCCL_DEBUG=WARN")
        # Google's libraries take a path by this name, such as that of a mounted Secret.
        is_path = name == "GOOGLE_APPLICATION_CREDENTIALS" and value.startswith("/")
        if (names_secret(name) and not is_path) or redacted_text(value) != value:
            raise ConfigError(
                f"--env {name} is a secret, which a manifest shows; make a Secret and write --secret NAME"
            )
        found[name] = value
    return found


def manifests(run: KubernetesRun, *, jobset: bool) -> list[Manifest]:
    """The objects of a Job or a JobSet, in the order in which they are created.

    In a Job a pod that fails is started again by itself, while those that lost it end (70 or 134) and are started
    again too. In a JobSet a pod that fails ends the whole Job, and all pods start again together.
    """
    about = _metadata(run)
    if run.queue is not None:
        about["labels"]["kueue.x-k8s.io/queue-name"] = run.queue
    return [*_config_map(run), *_access(run), *(_jobset(run, about) if jobset else _job(run, about))]


def _metadata(run: KubernetesRun) -> Manifest:
    labels = {"app.kubernetes.io/name": "jaxtrain", "app.kubernetes.io/instance": run.name}
    return {"name": run.name, "namespace": run.namespace, "labels": labels}


def _config_map(run: KubernetesRun) -> list[Manifest]:
    if run.config_file is None:
        return []
    named, (name, text) = {**_metadata(run), "name": run.config_map}, run.config_file
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "immutable": True, "data": {name: text}}]


def _access(run: KubernetesRun) -> list[Manifest]:
    """The account of the pods and its right to read what tells a process which others there are.

    jax reads the pod by its address and then its job (jax/_src/clusters/k8s_cluster.py, 0.10.2). A run of one pod reads
    nothing, and gets no right.
    """
    if run.hosts == 1:
        return []
    account, api = run.service_account or run.name, "rbac.authorization.k8s.io"
    own = [] if run.service_account else [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(run)}]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]},
    ]
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(run),
        "roleRef": {"apiGroup": api, "kind": "Role", "name": run.name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": run.namespace}],
    }
    return [*own, {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": _metadata(run), "rules": rules}, binding]


def _job(run: KubernetesRun, about: Manifest) -> list[Manifest]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run),
        # The processes find each other before any of them is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": run.name}},
    }
    # Where one host is lost, every pod fails once.
    spec = _job_spec(run, backoff_limit=run.restarts * run.hosts, coordinator=f"{run.name}-0.{run.name}")
    if run.hosts > 1:
        spec["template"]["spec"]["subdomain"] = run.name
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}
    return [service, job] if run.hosts > 1 else [job]


def _jobset(run: KubernetesRun, about: Manifest) -> list[Manifest]:
    if run.tpu is not None and run.hosts > 1:
        # All pods of a slice on one slice, and no other job's beside them.
        about["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    # The service is called as the JobSet, and jax relies on it.
    coordinator = f"{run.name}-{_REPLICATED_JOB}-0-0.{run.name}"
    job = {"spec": _job_spec(run, backoff_limit=0, coordinator=coordinator)}
    # A job that ended by a rule FailJob of its pods would fail in the same way again.
    lasting = {"name": "lasting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": run.restarts, "rules": [lasting]},
        "replicatedJobs": [{"name": _REPLICATED_JOB, "replicas": 1, "template": job}],
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": about, "spec": spec}]


def _job_spec(run: KubernetesRun, *, backoff_limit: int, coordinator: str) -> Manifest:
    return {
        "parallelism": run.hosts,
        "completions": run.hosts,
        # The index of a pod is the number of its process. A single pod is not to look for others.
        "completionMode": "Indexed" if run.hosts > 1 else "NonIndexed",
        "backoffLimit": backoff_limit,
        "podFailurePolicy": _pod_failure_policy(),
        "template": {"metadata": {"labels": _metadata(run)["labels"]}, "spec": _pod(run, coordinator)},
    }


def _pod_failure_policy() -> Manifest:
    """What the end of a pod means; the first rule that matches decides.

    A pod that was evicted, or that saved and stopped (75), is started again without counting as a failure. A mistake in
    the config (2) or data (3) and numbers that diverged (5) fail in the same way at every start. All other failures are
    counted.
    """
    lasting = sorted(error.exit_code for error in (ConfigError, DataError, DivergedError))
    on_exit = {"containerName": _CONTAINER, "operator": "In"}
    return {
        "rules": [
            # A JobSet has no default for the status.
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {**on_exit, "values": [PreemptedError.exit_code]}},
            {"action": "FailJob", "onExitCodes": {**on_exit, "values": lasting}},
        ]
    }


def _pod(run: KubernetesRun, coordinator: str) -> Manifest:
    spec: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": run.grace_seconds}
    # The token of an account opens the interface of the cluster, and a single pod has no use for it. An account that
    # was named has one (for a bucket, as a rule).
    if run.hosts > 1 or run.service_account is not None:
        spec["serviceAccountName"] = run.service_account or run.name
    else:
        spec["automountServiceAccountToken"] = False
    if run.tpu is not None:
        spec["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": run.tpu.accelerator,
            "cloud.google.com/gke-tpu-topology": run.tpu.topology,
        }
    spec["securityContext"] = {
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": _GROUP,
        "fsGroupChangePolicy": "OnRootMismatch",
        # The devices of a TPU node belong to root, as far as we know; images of jaxtrain have another user.
        **({"runAsUser": 0} if run.tpu is not None else {"runAsNonRoot": True}),
    }
    # Hosts of a TPU slice wait for their coordinator by themselves.
    if run.hosts > 1 and run.tpu is None:
        wait = {
            "name": "wait-for-coordinator",
            "image": run.image,
            "command": ["python3", "-c", _WAIT],
            "args": [str(_JOIN_SECONDS), coordinator],
            **_container_security(run),
            "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        }
        spec["initContainers"] = [wait]
    # Processes that share memory (NCCL, workers of the data) find 64 MiB otherwise.
    volumes: list[Manifest] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Manifest] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if run.config_file is not None:
        volumes.append({"name": "config", "configMap": {"name": run.config_map}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    for number, (path, claim) in enumerate(run.volumes.items()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    spec["containers"] = [{**_container(run), "volumeMounts": mounts}]
    spec["volumes"] = volumes
    return spec


def _container(run: KubernetesRun) -> Manifest:
    # Without the first, a pod whose accelerator does not start would train on its CPUs.
    platforms = "tpu,cpu" if run.tpu is not None else "cuda,cpu" if run.gpus is not None else "cpu"
    # The last also for one host: as long it waits for pods of the job before, which may save for their grace period.
    join_seconds = str(max(_JOIN_SECONDS, run.grace_seconds + 60))
    values = {"JAX_PLATFORMS": platforms, "PYTHONUNBUFFERED": "1", "JAXTRAIN_JOIN_TIMEOUT_SECONDS": join_seconds}
    container: Manifest = {
        "name": _CONTAINER,
        "image": run.image,
        "command": ["jaxtrain"],
        "args": [_literal(word) for word in run.words],
        "env": [{"name": name, "value": _literal(value)} for name, value in {**values, **run.environment}.items()],
    }
    if run.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in run.secrets]
    chips = None if run.tpu is None else run.tpu.chips_per_host
    # CPUs are asked for and not limited: a pod that is throttled holds up all others. Requests of devices and limits
    # must be equal, and memory beyond what was asked for is what other pods are evicted by.
    amounts = {"memory": run.memory, "nvidia.com/gpu": run.gpus, "google.com/tpu": chips}
    limits = {name: amount for name, amount in amounts.items() if amount is not None}
    requests = {**({} if run.cpus is None else {"cpu": run.cpus}), **limits}
    resources = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {**container, **_container_security(run), "resources": resources}


def _literal(text: str) -> str:
    """What Kubernetes reads as this text: it replaces $(NAME), and makes one dollar of two."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _container_security(run: KubernetesRun) -> Manifest:
    if run.tpu is not None:
        return {}
    return {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}


def manifests_text(run: KubernetesRun, *, jobset: bool) -> str:
    """Return the text of a YAML file with the objects of a run, and how to start and stop it."""
    import yaml

    class Writer(yaml.SafeDumper):
        """Writes every list and mapping out where it stands."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(writer: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        # Kubernetes reads more texts as numbers and truths than PyYAML quotes: 1e3, 08, y.
        if re.fullmatch(r"[-+]?\.?\d[\w.+-]*|[yYnN]", value):
            style = "'"
        return writer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Writer.add_representer(str, text)
    body = yaml.dump_all(
        manifests(run, jobset=jobset),
        Dumper=Writer,
        sort_keys=False,
        width=10_000,
        explicit_start=True,
        allow_unicode=True,
    )
    kind = "jobset" if jobset else "job"
    header = (
        f"jaxtrain {shlex.join(run.words)}, on {run.hosts} host{'s' if run.hosts > 1 else ''}",
        "To start it:  kubectl apply -f FILE",
        # By default kubectl returns before the pods have ended.
        f"To stop it (it saves first):  kubectl delete {kind} {run.name} -n {run.namespace} --cascade=foreground",
        f"What process 0 prints:  kubectl logs -f -n {run.namespace} -l app.kubernetes.io/instance={run.name}",
    )
    return "".join(f"# {' '.join(line.splitlines())}\n" for line in header) + body


def apply_manifests(text: str) -> None:
    """Give manifests to the cluster that `kubectl` is set up for; what kubectl says goes to the terminal.

    Args:
        text: as `manifests_text` returns it.

    Raises:
        ConfigError: there is no kubectl.
        ClusterError: kubectl failed; the message ends with its reason.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("no kubectl on PATH; write the manifests with -o run.yaml, and kubectl apply -f run.yaml")
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"kubectl apply failed: {' '.join(done.stderr.split())[-400:]}")
    print(done.stdout, end="")
