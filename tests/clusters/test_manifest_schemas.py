"""Manifests against the schemas of Kubernetes (kubernetes-validate) and the models of JobSet (kubeflow-trainer-api).

Both find unknown keys and wrong types and know no words of enumerations, which test_kubernetes_manifests.py holds.
"""

import copy
from functools import reduce

import pytest
import yaml

from jaxtrain.cli import main

pytestmark = pytest.mark.long

COMMON = ("--image", "example.com/jaxtrain:0.1.0", "--volume", "runs:/runs", "--queue", "team", "--secret", "wandb")
# id: words after `submit KIND quickstart`
RUNS = {
    "cpus of two hosts": ("--hosts", "2", "--cpus", "2", "--memory", "8Gi", "--env", "A=1"),
    "gpus of four hosts": ("--hosts", "4", "--gpus", "8"),
    "one gpu": ("--gpus", "1"),
    "a slice of tpus": ("--tpu", "v5e/4x4"),
    "an account that exists": ("--hosts", "2", "--service-account", "buckets"),
}
# The oldest in which a pod failure policy is stable, and the newest that kubernetes-validate 1.37 knows.
VERSIONS = ("1.31", "1.37")


@pytest.fixture
def written(capsys):
    def call(kind, *words):
        assert main(["submit", kind, "quickstart", "train.global_batch_size=32", *COMMON, *words]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return call


def mistakes(manifest, version="1.37"):
    """What the validators of its kind say of a manifest."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if manifest["kind"] == "JobSet":
        return jobset_mistakes(manifest, version)
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def jobset_mistakes(manifest, version):
    pytest.importorskip("kubeflow_trainer_api")
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from pydantic import ValidationError

    try:
        read = JobsetV1alpha2JobSet.from_dict(manifest)
    except ValidationError as error:
        return [str(error)]
    assert read is not None
    # The models drop keys that they do not know.
    found = list(lost(manifest, read.to_dict()))
    for replicated in manifest["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **replicated["template"]}
        found += mistakes(job, version)
    return found


def lost(given, read, path=""):
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(read, dict) or key not in read:
                yield f"{path}.{key}"
            else:
                yield from lost(value, read[key], f"{path}.{key}")
    elif isinstance(given, list):
        if not isinstance(read, list) or len(read) != len(given):
            yield path
            return
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_every_manifest_has_only_keys_that_are_known(written, kind, words):
    manifests = written(kind, *words)
    assert {one["kind"] for one in manifests} & {"Job", "JobSet"}
    for version in VERSIONS:
        for manifest in manifests:
            assert mistakes(manifest, version) == [], manifest["kind"]


# id: (kind of the command, kind of the object, path to a mapping, key, wrong value)
POD = ("spec", "template", "spec")
IN_JOBSET = ("spec", "replicatedJobs", 0, "template")
MUTATIONS = {
    "misspelt subdomain": ("job", "Job", POD, "subdomian", "x"),
    "grace on the container": ("job", "Job", (*POD, "containers", 0), "terminationGracePeriodSeconds", 5),
    "policy in the pod": ("job", "Job", POD, "podFailurePolicy", {"rules": []}),
    "text for a count": ("job", "Job", ("spec",), "parallelism", "two"),
    "rule without action": ("job", "Job", ("spec", "podFailurePolicy", "rules", 1), "onExitCode", {"values": [75]}),
    "unknown key of the service": ("job", "Service", ("spec",), "publishNotReady", True),
    "verbs of the role": ("job", "Role", ("rules", 0), "verb", ["get"]),
    "subject": ("job", "RoleBinding", ("subjects", 0), "nameSpace", "x"),
    "misspelt in a JobSet": ("jobset", "JobSet", (*IN_JOBSET, *POD), "subdomian", "x"),
    "replica": ("jobset", "JobSet", ("spec", "replicatedJobs", 0), "replica", 1),
    "restarts in words": ("jobset", "JobSet", ("spec", "failurePolicy"), "maxRestarts", "many"),
    "unknown key of the network": ("jobset", "JobSet", ("spec", "network"), "subDomain", "x"),
}


@pytest.mark.parametrize(("command", "kind", "path", "key", "value"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mistake_in_a_manifest_is_found(written, command, kind, path, key, value):
    (manifest,) = (one for one in written(command, "--hosts", "2", "--gpus", "1") if one["kind"] == kind)
    wrong = copy.deepcopy(manifest)
    reduce(lambda inner, step: inner[step], path, wrong)[key] = value
    assert mistakes(manifest) == []
    assert mistakes(wrong) != []
