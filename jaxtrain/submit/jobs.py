"""A training as a Kubernetes Job or as a JobSet. No jax here.

One Job has all hosts as its pods: jax counts the processes of a cluster by `parallelism` of the job that a pod belongs
to, so that a JobSet with two replicas would be two clusters that train beside each other.
"""

from jaxtrain.submit.kubernetes import REPLICATED_JOB, KubernetesRun, Manifest, access, config_map, metadata
from jaxtrain.submit.pods import pod_failure_policy, pod_template


def job_manifests(run: KubernetesRun) -> list[Manifest]:
    """Returns the objects of a plain Job, in the order in which they are created.

    A pod that fails is started again by itself, while those that lost it end (exit code 70) and are started again too.
    """
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run),
        "spec": {
            "clusterIP": "None",
            # The processes find each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {"job-name": run.name},
        },
    }
    # Where one host is lost, every pod fails once.
    spec = _job_spec(
        run, backoff_limit=run.restarts * run.hosts, coordinator=f"{run.name}-0.{run.name}", subdomain=run.name
    )
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(run, queue=True), "spec": spec}
    return [*config_map(run), *access(run), *([service] if run.hosts > 1 else []), job]


def jobset_manifests(run: KubernetesRun) -> list[Manifest]:
    """Returns the objects of a JobSet, in the order in which they are created.

    A pod that fails ends the whole Job, and the JobSet starts all pods again together.
    """
    # The service is called as the JobSet, and jax relies on it.
    coordinator = f"{run.name}-{REPLICATED_JOB}-0-0.{run.name}"
    about = metadata(run, queue=True)
    if run.tpu is not None and run.hosts > 1:
        # All pods of a slice on one slice, and no other job's beside them.
        about["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    job = {"spec": _job_spec(run, backoff_limit=0, coordinator=coordinator, subdomain=None)}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": about,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": run.restarts,
                # A job that ended by a rule FailJob of its pods would fail in the same way again.
                "rules": [{"name": "lasting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": job}],
        },
    }
    return [*config_map(run), *access(run), jobset]


def _job_spec(run: KubernetesRun, *, backoff_limit: int, coordinator: str, subdomain: str | None) -> Manifest:
    several = run.hosts > 1
    return {
        "parallelism": run.hosts,
        "completions": run.hosts,
        # The index of a pod is the number of its process. A single pod is not to look for others.
        "completionMode": "Indexed" if several else "NonIndexed",
        "backoffLimit": backoff_limit,
        "podFailurePolicy": pod_failure_policy(),
        "template": pod_template(run, coordinator=coordinator, subdomain=subdomain if several else None),
    }
