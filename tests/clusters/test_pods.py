"""What `submit job` and `submit jobset` write, run as pods: jax's own detection asks a stand-in cluster over TLS.

Each pod gets exactly what the manifests say: names, subdomain, account, rights, variables, files, init containers and
arguments. The cluster is a stand-in (standin_kubernetes.py); jax's detection, the package `kubernetes`, TLS and DNS
names are real.
"""

import json

import pytest
import standin_kubernetes as standin
import yaml

from jaxtrain.cli import main

pytestmark = pytest.mark.long

CONFIG = """
model: {kind: transformer, num_layers: 1, embed_dim: 16, num_heads: 2, mlp_dim: 32, max_sequence_length: 16}
data: {kind: text, tokenizer: {kind: byte}}
train: {steps: 4, global_batch_size: 4}
checkpoint: {every: 2}
evaluation: {every: null}
logging: {tensorboard: false, report: false}
parallel: {fsdp: 2}
"""
# Says which process this is, as jaxtrain finds it, and leaves.
JOIN = """
from jaxtrain.runtime import distributed
distributed.start()
import jax
print(jax.process_index(), jax.process_count(), flush=True)
"""


@pytest.fixture
def cluster(tmp_path, capsys):
    """Writes manifests, and runs their pods until all have ended."""
    pytest.importorskip("kubernetes", reason="needs the package kubernetes: pip install 'jaxtrain[k8s]'")
    reason = standin.reason_for_no_pods()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "runs").mkdir()
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)

    def call(kind, *words, program=None):
        words = (*words, "--image", "example.com/jaxtrain:0.1.0", "--volume", "runs:/srv/runs", "--hosts", "2")
        assert main(["submit", kind, str(config), *words, "--namespace", "research"]) == 0
        pods = standin.pods_of(list(yaml.safe_load_all(capsys.readouterr().out)))
        folder = tmp_path / f"cluster-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        with standin.interface(pods, folder) as (port, asked):
            options = {"port": port, "folder": folder, "claims": {"runs": tmp_path / "runs"}}
            started = []
            try:
                for index in range(pods.count):
                    started.append(standin.start_pod(pods, index, program=program, **options))
                said = [pod.communicate(timeout=240) for pod in started]
            finally:
                for pod in started:
                    pod.kill()
        return [(pod.returncode, *texts) for pod, texts in zip(started, said, strict=True)], asked

    return call


def test_pods_of_a_job_train_as_one_run(cluster, tmp_path):
    ended, asked = cluster("job", "--env", "JAX_NUM_CPU_DEVICES=1")
    assert [code for code, _, _ in ended] == [0, 0], ended
    info = json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())
    # Both pods, and the config that came from the manifests.
    assert info["config"]["train"]["steps"] == 4
    assert "2 x CPU over 2 processes" in ended[0][1] + ended[0][2]
    rows = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 4
    assert set(asked) == {"/api/v1/namespaces/research/pods", "/apis/batch/v1/namespaces/research/jobs/tiny"}


def test_pods_of_a_jobset_are_one_cluster(cluster):
    ended, _ = cluster("jobset", program=["python3", "-c", JOIN])
    # The line before it is the init container's, which waits until the first pod has an address.
    first = "tiny-hosts-0-0.tiny 127.0.1.1\n"
    assert [(code, out) for code, out, _ in ended] == [(0, f"{first}0 2\n"), (0, f"{first}1 2\n")], ended
