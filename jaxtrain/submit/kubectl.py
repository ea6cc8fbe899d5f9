"""Manifests as text, and the program that gives them to a cluster. No jax here."""

import re
import shutil
import subprocess
from collections.abc import Sequence

from jaxtrain.errors import ConfigError, UserError
from jaxtrain.submit.kubernetes import KubernetesRun, Manifest

# Kubernetes reads more texts as numbers and truths than PyYAML quotes: 1e3, 08, y.
_READ_OTHERWISE = re.compile(r"[-+]?\.?\d[\w.+-]*|[yYnN]")


class ClusterError(UserError):
    """A cluster could not be reached, or refused what it was given (exit code 1)."""

    exit_code = 1


def manifests_text(manifests: Sequence[Manifest], *, header: Sequence[str]) -> str:
    """Returns the text of a YAML file with several objects.

    Args:
        manifests: The objects, in the order in which they are created.
        header: Lines of a comment at the top.
    """
    # Only what writes them needs it.
    import yaml

    class Writer(yaml.SafeDumper):
        """Writes texts of several lines as such, and lists below their key as editors indent them."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(writer: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value and value.isascii() and value.replace("\n", "").isprintable() else None
        if _READ_OTHERWISE.fullmatch(value):
            style = "'"
        return writer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Writer.add_representer(str, text)
    body = yaml.dump_all(
        manifests, Dumper=Writer, sort_keys=False, width=10_000, explicit_start=True, allow_unicode=True
    )
    # A setting of several lines is no reason to leave the comment.
    return "".join(f"# {' '.join(line.splitlines())}\n" for line in header) + body


def apply_manifests(text: str, run: KubernetesRun) -> None:
    """Gives manifests to the cluster that `kubectl` is set up for; what kubectl says goes to the terminal.

    Args:
        text: As `manifests_text` returns it.
        run: The run, whose queue, claims, secrets and account must be there: pods would wait for them without end.

    Raises:
        ConfigError: There is no kubectl, the cluster lacks one of these, or the job is there and has ended.
        ClusterError: kubectl failed; the message ends with its reason.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError(
            "--run gives the manifests to kubectl, which is not on the PATH; install it, or write them with -o "
            "run.yaml and apply them where it is: kubectl apply -f run.yaml"
        )
    for option, kind, name in _needed(run):
        done = _ask(program, ["get", kind, name, "-n", run.namespace, "-o", "name"])
        # A user who may not read, say, secrets may still name them.
        if done.returncode and ("(NotFound)" in done.stderr or "have a resource type" in done.stderr):
            raise ConfigError(
                f"{option} {name}: {_reason(done.stderr)} (namespace {run.namespace}); create it, or name another"
            )
    _check_job(program, run, "jobset" if "kind: JobSet" in text.splitlines() else "job")
    done = _ask(program, ["apply", "-f", "-"], text)
    if done.returncode:
        raise ClusterError(f"kubectl apply failed: {_reason(done.stderr)}")
    print(done.stdout, end="")


def _check_job(program: str, run: KubernetesRun, kind: str) -> None:
    """Raises where a job of this name has ended or is being deleted: applying it starts nothing, and is no error."""
    shown = 'jsonpath={.metadata.deletionTimestamp} {.status.conditions[?(@.status=="True")].type}'
    done = _ask(program, ["get", kind, run.name, "-n", run.namespace, "-o", shown])
    deleted, _, conditions = done.stdout.partition(" ")
    ended = next((one for one in conditions.split() if one in ("Complete", "Completed", "Failed")), None)
    if done.returncode or not (deleted or ended):
        return
    if deleted:
        raise ConfigError(f"{kind} {run.name} is being deleted; run this again once it is gone, or use another --name")
    raise ConfigError(
        f"{kind} {run.name} is there and has ended ({ended}), so that applying it starts nothing; delete it first, and "
        f"the run goes on from its checkpoint: kubectl delete {kind} {run.name} -n {run.namespace} --cascade=foreground"
    )


def _needed(run: KubernetesRun) -> list[tuple[str, str, str]]:
    """Returns (option, kind, name) of the objects that a run uses and does not make."""
    found = [("--volume", "persistentvolumeclaim", volume.claim) for volume in run.volumes]
    found += [("--secret", "secret", secret) for secret in run.secrets]
    if run.queue is not None:
        found.append(("--queue", "localqueue.kueue.x-k8s.io", run.queue))
    if run.service_account is not None:
        found.append(("--service-account", "serviceaccount", run.service_account))
    return found


def _ask(program: str, words: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *words], input=text or "", capture_output=True, text=True, check=False)
    except OSError as error:
        raise ClusterError(f"{program} cannot be started: {error.strerror}") from None


def _reason(said: str) -> str:
    """Returns one line for what kubectl wrote to standard error."""
    # Frequent reasons, for which it prints whole templates or several lines.
    if "field is immutable" in said:
        return "this name is taken; delete that job first (the run goes on from its checkpoint), or use --name"
    if 'no matches for kind "JobSet"' in said:
        return "the cluster knows no JobSet; install its controller (jobset.sigs.k8s.io), or write submit job"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it said nothing"
