"""A stand-in for a Kubernetes cluster, made from manifests: an interface over TLS, and pods in namespaces of their own.

What a cluster would do with the manifests is done here as far as jax and jaxtrain meet it: the Job controller's labels,
host names and completion indices, the accounts and the rights of a Role, DNS names of a headless service, the files of
a service account, ConfigMaps and claims. No container is started: a pod is a process with its own mounts and host name.
"""

import http.server
import json
import os
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlparse

ROOT = Path(__file__).resolve().parent.parent.parent
SECRETS = "/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True)
class Pods:
    """The pods of one Job as the controllers of a cluster make them.

    Attributes:
        job: name of the Job that the pods belong to.
        subdomain: name of their headless service.
        namespace: of all objects.
        spec: the spec of the Job.
        labels: of the Job and its pods.
        account: the service account of the pods.
        rights: (group, resource, verb) that the account has.
        config_maps: name -> file -> text.
    """

    job: str
    subdomain: str
    namespace: str
    spec: dict
    labels: dict
    account: str
    rights: frozenset
    config_maps: dict

    @property
    def count(self):
        return self.spec["completions"]

    def address(self, index):
        return f"127.0.1.{index + 1}"


def pods_of(manifests):
    """Does what the controllers of Jobs and JobSets do with manifests, as far as a pod sees it."""
    by_kind = {one["kind"]: one for one in manifests}
    if "JobSet" in by_kind:
        whole = by_kind["JobSet"]
        (replicated,) = whole["spec"]["replicatedJobs"]
        name = whole["metadata"]["name"]
        job, spec = f"{name}-{replicated['name']}-0", replicated["template"]["spec"]
        subdomain = whole["spec"]["network"].get("subdomain", name)
        labels = {"jobset.sigs.k8s.io/jobset-name": name}
        assert whole["spec"]["network"]["enableDNSHostnames"]
    else:
        whole = by_kind["Job"]
        job, spec, labels = whole["metadata"]["name"], whole["spec"], {}
        subdomain = spec["template"]["spec"]["subdomain"]
        service = by_kind["Service"]
        assert service["metadata"]["name"] == subdomain
        assert service["spec"]["selector"] == {"job-name": job}
    account = spec["template"]["spec"]["serviceAccountName"]
    rights = set()
    binding = by_kind.get("RoleBinding")
    if binding is not None and {one["name"] for one in binding["subjects"]} == {account}:
        for rule in by_kind["Role"]["rules"]:
            rights |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    maps = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "ConfigMap"}
    labels = {**labels, "job-name": job, "batch.kubernetes.io/job-name": job}
    return Pods(job, subdomain, whole["metadata"]["namespace"], spec, labels, account, frozenset(rights), maps)


class _Answers(http.server.BaseHTTPRequestHandler):
    """The three answers that jax asks a cluster for, as the rights of the account allow."""

    pods: Pods
    asked: list

    def do_GET(self):
        url, pods = urlparse(self.path), self.pods
        self.asked.append(url.path)
        if self.headers.get("authorization") not in (f"bearer {pods.account}", f"Bearer {pods.account}"):
            return self._say(401, {"kind": "Status", "status": "Failure", "reason": "Unauthorized", "code": 401})
        within = f"namespaces/{pods.namespace}"
        if url.path == f"/api/v1/{within}/pods" and ("", "pods", "list") in pods.rights:
            _, _, address = parse_qs(url.query)["fieldSelector"][0].partition("=")
            items = [self._pod(index) for index in range(pods.count) if pods.address(index) == address]
            return self._say(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
        if url.path == f"/apis/batch/v1/{within}/jobs/{pods.job}" and ("batch", "jobs", "get") in pods.rights:
            about = {"name": pods.job, "labels": pods.labels}
            return self._say(200, {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": pods.spec})
        self._say(403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403})

    def _pod(self, index):
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.pods.job, "uid": "1", "controller": True}
        labels = {**self.pods.labels, "batch.kubernetes.io/job-completion-index": str(index)}
        about = {"name": f"{self.pods.job}-{index}-abcde", "labels": labels, "ownerReferences": [owner]}
        spec = {"subdomain": self.pods.subdomain, "containers": [{"name": "train"}]}
        status = {"podIP": self.pods.address(index)}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec, "status": status}

    def _say(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@contextmanager
def interface(pods, folder):
    """Answers over TLS on the loopback interface; yields (port, paths that were asked for)."""
    certificate, key = folder / "ca.crt", folder / "tls.key"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kubernetes -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *words.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    asked: list = []
    handler = type("Answers", (_Answers,), {"pods": pods, "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reason_for_no_pods():
    """Why no pod can be made here; None where it can."""
    if shutil.which("unshare") is None or shutil.which("openssl") is None:
        return "needs the programs unshare and openssl"
    done = subprocess.run(
        ["unshare", "--mount", "--uts", "mount", "--make-rprivate", "/"], capture_output=True, text=True, timeout=30
    )
    return None if done.returncode == 0 else f"unshare --mount is not permitted here: {done.stderr.strip()}"


def start_pod(pods, index, *, port, folder, claims, program=None):
    """Starts a pod: its init containers one after the other, and its container.

    Args:
        pods: the pods of a Job.
        index: completion index.
        port: of the interface.
        folder: with ca.crt; the pod's own files are made below it.
        claims: claim -> folder of this machine.
        program: what runs in place of `jaxtrain` and its arguments; None: those of the manifest.
    """
    own = folder / f"pod-{index}"
    own.mkdir()
    spec = pods.spec["template"]["spec"]
    names = [f"{pods.address(i)} {pods.job}-{i} {pods.job}-{i}.{pods.subdomain}" for i in range(pods.count)]
    (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    # `jaxtrain` and python3 of the image.
    (own / "bin").mkdir()
    for name, words in (("jaxtrain", f"{sys.executable} -m jaxtrain"), ("python3", sys.executable)):
        (own / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (own / "bin" / name).chmod(0o755)
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"hostname {pods.job}-{index}",
        # A copy, so that nothing of the machine changes.
        f"cp -a /etc {own}/etc",
        f"cp {own}/hosts {own}/etc/hosts",
        f"mount --bind {own}/etc /etc",
        "mount -t tmpfs none /run",
        f"mkdir -p {SECRETS} && cp {folder}/ca.crt {SECRETS}/ca.crt",
        f"printf %s {pods.account} > {SECRETS}/token",
        f"printf %s {pods.namespace} > {SECRETS}/namespace",
        "mount -t tmpfs none /srv",
    ]
    (container,) = spec["containers"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume, path = volumes[mount["name"]], mount["mountPath"]
        if "configMap" in volume:
            lines.append(f"mkdir -p {path}")
            for file, text in pods.config_maps[volume["configMap"]["name"]].items():
                (own / file).write_text(text)
                lines.append(f"cp {own}/{file} {path}/{file}")
        elif "persistentVolumeClaim" in volume:
            claim = claims[volume["persistentVolumeClaim"]["claimName"]]
            lines.append(f"mkdir -p {path} && mount --bind {claim} {path}")
        else:
            assert volume["emptyDir"] == {"medium": "Memory"}
            lines.append(f"mount -t tmpfs none {path}")
    commands = [[*one["command"], *one["args"]] for one in spec.get("initContainers", [])]
    commands.append(program or [*container["command"], *(word.replace("$$", "$") for word in container["args"])])
    lines += [shlex.join(command) for command in commands[:-1]]
    lines.append(f"exec {shlex.join(commands[-1])}")
    environment = {
        **{"PATH": f"{own}/bin:/usr/bin:/bin", "HOME": str(own), "HOSTNAME": f"{pods.job}-{index}"},
        **{"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)},
        # Where the package is, as an image has it installed, and compilers that do not take long.
        **{"PYTHONPATH": str(ROOT), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")},
        **{one["name"]: one["value"].replace("$$", "$") for one in container["env"]},
    }
    if pods.spec["completionMode"] == "Indexed":
        environment["JOB_COMPLETION_INDEX"] = str(index)
    return subprocess.Popen(
        ["unshare", "--mount", "--uts", "bash", "-c", "\n".join(lines)],
        env=environment, cwd=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
