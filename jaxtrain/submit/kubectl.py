"""Manifests as text, and the program that gives them to a cluster. No jax here."""

import shutil
import subprocess
from collections.abc import Sequence

from jaxtrain.errors import ConfigError, UserError
from jaxtrain.submit.kubernetes import Manifest


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
        return writer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Writer.add_representer(str, text)
    body = yaml.dump_all(
        manifests, Dumper=Writer, sort_keys=False, width=10_000, explicit_start=True, allow_unicode=True
    )
    return "".join(f"# {line}\n" for line in header) + body


def apply_manifests(text: str) -> None:
    """Gives manifests to the cluster that `kubectl` is set up for; what kubectl says goes to the terminal.

    Args:
        text: As `manifests_text` returns it.

    Raises:
        ConfigError: There is no kubectl.
        ClusterError: kubectl failed; the message ends with its last line.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError(
            "--run gives the manifests to kubectl, which is not on the PATH; install it, or write them with -o "
            "run.yaml and apply them where it is: kubectl apply -f run.yaml"
        )
    try:
        done = subprocess.run([program, "apply", "-f", "-"], input=text, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise ClusterError(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1] if said else f"it ended with code {done.returncode} and said nothing"
        # The most frequent reason, for which kubectl prints the whole template.
        if "field is immutable" in done.stderr:
            reason = "this name is taken; delete that job first (the run goes on from its checkpoint), or use --name"
        raise ClusterError(f"kubectl apply failed: {reason[:400]}")
