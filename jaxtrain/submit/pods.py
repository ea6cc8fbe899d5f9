"""The pods of a training on Kubernetes: one per host, all alike. No jax here."""

import re

from jaxtrain.errors import ConfigError, DataError, DivergedError, PreemptedError
from jaxtrain.submit.kubernetes import CONFIG_FOLDER, KubernetesRun, Manifest, config_map_name

# Name of the container that trains.
CONTAINER = "train"
# The group of the user of the images in containers/: it may write to the volumes.
_GROUP = 1000
# Nodes are added, and images are pulled, in minutes rather than seconds; the usual limit is 300.
JOIN_SECONDS = 1800
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


def pod_failure_policy() -> Manifest:
    """Returns what the end of a pod means; the first rule that matches decides.

    A pod that was evicted, or that saved and stopped (75), is started again without counting as a failure. A mistake in
    the config (2) or data (3) and numbers that diverged (5) fail in the same way at every start. All other failures are
    counted.
    """
    lasting = sorted(error.exit_code for error in (ConfigError, DataError, DivergedError))
    return {
        "rules": [
            # A JobSet has no default for the status.
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": _on_exit([PreemptedError.exit_code])},
            {"action": "FailJob", "onExitCodes": _on_exit(lasting)},
        ]
    }


def _on_exit(codes: list[int]) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": codes}


def pod_template(run: KubernetesRun, *, coordinator: str, subdomain: str | None = None) -> Manifest:
    """Returns the template of the pods.

    Args:
        run: The run.
        coordinator: Host name of the first pod, as the others find it.
        subdomain: Name of the headless service of a plain Job; None: a JobSet sets it.
    """
    spec: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": run.grace_seconds}
    if subdomain is not None:
        spec["subdomain"] = subdomain
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
    spec["securityContext"] = _pod_security(run)
    # Hosts of a TPU slice wait for their coordinator by themselves.
    if run.hosts > 1 and run.tpu is None:
        spec["initContainers"] = [
            {
                "name": "wait-for-coordinator",
                "image": run.image,
                "command": ["python3", "-c", _WAIT],
                "args": [str(JOIN_SECONDS), coordinator],
                **_container_security(run),
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
            }
        ]
    spec["containers"] = [_container(run)]
    spec["volumes"] = [
        # Processes that share memory (NCCL, workers of the data) find 64 MiB otherwise.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        *([{"name": "config", "configMap": {"name": config_map_name(run)}}] if run.config_file is not None else []),
        *(
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for number, volume in enumerate(run.volumes)
        ),
    ]
    labels = {"app.kubernetes.io/name": "jaxtrain", "app.kubernetes.io/instance": run.name}
    return {"metadata": {"labels": labels}, "spec": spec}


def _container(run: KubernetesRun) -> Manifest:
    container: Manifest = {
        "name": CONTAINER,
        "image": run.image,
        "command": ["jaxtrain"],
        "args": [_literal(word) for word in run.words],
        "env": _environment(run),
    }
    if run.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in run.secrets]
    container.update(_container_security(run))
    container["resources"] = _resources(run)
    container["volumeMounts"] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        *([{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}] if run.config_file is not None else []),
        *({"name": f"volume-{number}", "mountPath": volume.path} for number, volume in enumerate(run.volumes)),
    ]
    return container


def _environment(run: KubernetesRun) -> list[Manifest]:
    # Without the first, a pod whose accelerator does not start would train on its CPUs.
    platforms = "tpu,cpu" if run.tpu is not None else "cuda,cpu" if run.gpus is not None else "cpu"
    values = {"JAX_PLATFORMS": platforms, "PYTHONUNBUFFERED": "1"}
    # Also for one host: as long it waits for pods of the job before, which may save for all of their grace period.
    values["JAXTRAIN_JOIN_TIMEOUT_SECONDS"] = str(max(JOIN_SECONDS, run.grace_seconds + 60))
    return [{"name": name, "value": _literal(value)} for name, value in {**values, **run.environment}.items()]


def _literal(text: str) -> str:
    """Returns what Kubernetes reads as this text."""
    # It replaces $(NAME), makes one dollar of two, and takes the byte after any other dollar for a character.
    return re.sub(r"\$(?=[$(]|[^\x00-\x7f])", "$$", text)


def _resources(run: KubernetesRun) -> Manifest:
    amounts: Manifest = {}
    if run.cpus is not None:
        amounts["cpu"] = run.cpus
    if run.memory is not None:
        amounts["memory"] = run.memory
    devices: Manifest = {}
    if run.gpus is not None:
        devices["nvidia.com/gpu"] = run.gpus
    if run.tpu is not None:
        devices["google.com/tpu"] = run.tpu.chips_per_host
    # CPUs are asked for and not limited: a pod that is throttled holds up all others. Requests of devices and limits
    # must be equal, and memory beyond what was asked for is what other pods are evicted by.
    limits = {**{name: amount for name, amount in amounts.items() if name == "memory"}, **devices}
    requests = {**amounts, **devices}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _pod_security(run: KubernetesRun) -> Manifest:
    security: Manifest = {
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": _GROUP,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    # The devices of a TPU node belong to root, as far as we know; images of jaxtrain have another user.
    return {**security, "runAsUser": 0} if run.tpu is not None else {**security, "runAsNonRoot": True}


def _container_security(run: KubernetesRun) -> Manifest:
    if run.tpu is not None:
        return {}
    return {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
