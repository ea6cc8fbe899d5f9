"""What `jaxtrain submit job` and `submit jobset` write, against schemas and beyond them; what is refused."""

import os
import stat
import sys

import pytest
import yaml

IMAGE = ("--image", "example.com/jaxtrain:0.1.0")
RUNS = ("--volume", "runs:/runs")
COMMON = (*IMAGE, *RUNS)


@pytest.fixture
def submit(cli):
    """Runs `jaxtrain submit KIND quickstart ...`; returns the manifests by kind."""

    def call(kind, *words, config="quickstart"):
        answer = cli("submit", kind, config, *words)
        assert (answer.code, answer.err) == (0, "")
        documents = list(yaml.safe_load_all(answer.out))
        assert len({one["kind"] for one in documents}) == len(documents)
        return {one["kind"]: one for one in documents}

    return call


def pod_of(manifests):
    job = manifests["Job"] if "Job" in manifests else job_of(manifests["JobSet"])
    return job["spec"]["template"]["spec"]


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_one_job_has_all_hosts_as_its_pods(submit, kind):
    manifests = submit(kind, "train.global_batch_size=32", *COMMON, "--hosts", "4", "--gpus", "8")
    if kind == "jobset":
        assert manifests["JobSet"]["spec"]["replicatedJobs"][0]["replicas"] == 1
        # jax reads the name of the JobSet as the subdomain.
        assert "subdomain" not in manifests["JobSet"]["spec"]["network"]
        assert manifests["JobSet"]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    else:
        service = manifests["Service"]["spec"]
        assert service == {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": "quickstart"},
        }
        assert pod_of(manifests)["subdomain"] == manifests["Service"]["metadata"]["name"]
    spec = manifests["Job"]["spec"] if kind == "job" else job_of(manifests["JobSet"])["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (4, 4, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["serviceAccountName"] == manifests["ServiceAccount"]["metadata"]["name"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_what_an_end_of_a_pod_means(submit, kind):
    manifests = submit(kind, *COMMON, "--hosts", "4", "--restarts", "5", "--grace", "90")
    spec = manifests["Job"]["spec"] if kind == "job" else job_of(manifests["JobSet"])["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    codes = {"containerName": "train", "operator": "In"}
    assert rules == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [75]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": [2, 3, 5]}},
    ]
    pod = pod_of(manifests)
    # A pod failure policy takes no other.
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 90
    if kind == "job":
        # Where one host is lost, all four pods fail.
        assert spec["backoffLimit"] == 20
        return
    assert spec["backoffLimit"] == 0
    failures = manifests["JobSet"]["spec"]["failurePolicy"]
    assert failures["maxRestarts"] == 5
    assert failures["rules"] == [
        {"name": "lasting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


def test_a_slice_of_tpus(submit):
    manifests = submit("jobset", "train.global_batch_size=16", *COMMON, "--tpu", "v5e/4x4", "--queue", "tpus")
    pod = pod_of(manifests)
    assert job_of(manifests["JobSet"])["spec"]["parallelism"] == 4
    # One that does not start is no slow run.
    assert {"name": "JAX_PLATFORMS", "value": "tpu,cpu"} in pod["containers"][0]["env"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert pod["containers"][0]["resources"] == {"requests": {"google.com/tpu": 4}, "limits": {"google.com/tpu": 4}}
    about = manifests["JobSet"]["metadata"]
    assert about["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"
    assert about["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}


def test_the_pods_run_the_checked_command_with_the_file_of_the_config(submit, tmp_path):
    file = tmp_path / "my run.yaml"
    file.write_text("model: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 3, global_batch_size: 8}\n")
    words = ("train.steps=4",)
    given = ("--env", "GREETING=$(HOME) $HOME", "--env", "GOOGLE_APPLICATION_CREDENTIALS=/var/run/key.json")
    manifests = submit("job", *words, *COMMON, *given, "--secret", "wandb", config=str(file))
    container = pod_of(manifests)["containers"][0]
    assert container["command"] == ["jaxtrain"]
    assert container["args"] == ["train", "/etc/jaxtrain/my-run.yaml", *words, "--run-dir", "/runs/my run"]
    assert manifests["ConfigMap"]["data"] == {"my-run.yaml": file.read_text()}
    named = manifests["ConfigMap"]["metadata"]["name"]
    assert manifests["ConfigMap"]["immutable"]
    assert {"name": "config", "configMap": {"name": named}} in pod_of(manifests)["volumes"]
    # Two dollars are one: Kubernetes replaces $(NAME) and nothing else.
    assert {"name": "GREETING", "value": "$$(HOME) $HOME"} in container["env"]
    assert {"name": "JAX_PLATFORMS", "value": "cpu"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    # Another text has another name: a job that runs, and starts pods again, keeps the config that it began with.
    file.write_text(file.read_text() + "seed: 7\n")
    changed = submit("job", *words, *COMMON, config=str(file))
    assert changed["ConfigMap"]["metadata"]["name"] != named


# id: (words after `submit job quickstart`, line)
REFUSED = {
    "gpus and tpus": ((*COMMON, "--tpu", "v5e/4x4", "--gpus", "8"), "not allowed with argument --tpu"),
    "volume without path": ((*IMAGE, "--volume", "runs"), "--volume takes CLAIM:PATH, not 'runs'"),
    "secret in a variable": ((*COMMON, "--env", "WANDB_API_KEY=abc"), "make a Secret and write --secret NAME"),
    "no kubectl": ((*COMMON, "--run"), "kubectl apply -f run.yaml"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "line"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_line(cli, words, line, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = cli("submit", "job", "quickstart", *words)
    assert (answer.code, answer.out) == (2, "")
    assert line in answer.err
    assert answer.err.count("\n") == 1
    assert "pw" not in answer.err.split("://")[-1]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A stand-in for kubectl, first on the PATH: a body of Python, which gets the arguments and the manifests."""

    def install(body):
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return install


def test_run_gives_kubectl_what_is_printed(cli, submit, kubectl, tmp_path):
    printed = submit("job", *COMMON, "--hosts", "2")
    given = tmp_path / "given.yaml"
    kubectl(f"assert sys.argv[1:] == ['apply', '-f', '-']; open({str(given)!r}, 'w').write(sys.stdin.read())")
    out = tmp_path / "run.yaml"
    answer = cli("submit", "job", "quickstart", *COMMON, "--hosts", "2", "-o", str(out), "--run")
    assert (answer.code, answer.out, answer.err) == (0, "", f"wrote {out}\n")
    assert given.read_text() == out.read_text()
    assert {one["kind"]: one for one in yaml.safe_load_all(given.read_text())} == printed


# Against the schemas of Kubernetes (kubernetes-validate) and the models of JobSet (kubeflow-trainer-api): both find
# unknown keys and wrong types and know no words of enumerations, which the tests above hold.
SCHEMAS = {
    "cpus of two hosts": ("--hosts", "2", "--cpus", "2", "--memory", "8Gi", "--env", "A=1", "--service-account", "x"),
    "gpus of four hosts": ("--hosts", "4", "--gpus", "8", "--queue", "team", "--secret", "wandb"),
}
# The oldest in which a pod failure policy is stable, and the newest that kubernetes-validate 1.37 knows.
VERSIONS = ("1.31", "1.37")


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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_every_manifest_has_only_keys_that_are_known(submit, kind):
    for name, words in SCHEMAS.items():
        manifests = submit(kind, "train.global_batch_size=32", *COMMON, *words)
        assert {"Job", "JobSet"} & set(manifests)
        for version in VERSIONS:
            for one, manifest in manifests.items():
                assert mistakes(manifest, version) == [], (name, one)
