"""Names and amounts as Kubernetes takes them, checked before a cluster refuses them. No jax here."""

import re

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?")
_CPUS = re.compile(r"[0-9]+(\.[0-9]+|m)?")
# As container runtimes read a reference: [host[:port]/]path[:tag][@digest].
_IMAGE = re.compile(
    r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?|[a-z0-9]+([._-]+[a-z0-9]+)*)"
    r"(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:[\w][\w.-]{0,127})?"
    r"(@sha256:[0-9a-f]{64})?"
)
_MOST_LABEL, _MOST_SUBDOMAIN = 63, 253


def as_name(text: str) -> str:
    """Returns a name of a job that is made of another name: "llama3_8b" -> "llama3-8b"."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return words if words[:1].isalpha() else f"run-{words}".rstrip("-")


def check_job_name(name: str, *, most: int) -> str:
    """Returns the name of a job, which is also the name of its service.

    Args:
        name: As `--name` gives it.
        most: Most characters, so that the names of its pods are no longer than Kubernetes takes.

    Raises:
        ConfigError: It is no name in DNS that begins with a letter (RFC 1035), or it is too long.
    """
    if not _LABEL.fullmatch(name) or not name[0].isalpha():
        takes = "lower-case letters, digits and '-', beginning with a letter and not ending with '-'"
        raise ConfigError(refusal("--name", takes, name, f"--name {as_name(name)[:most]}".rstrip("-")))
    if len(name) > most:
        raise ConfigError(
            f"--name {name} has {len(name)} characters, and at most {most} leave room for the numbers of its pods; "
            f"write --name {name[:most].rstrip('-')}"
        )
    return name


def check_label(name: str, *, option: str, write: str) -> str:
    """Returns a name of one part, such as that of a namespace.

    Raises:
        ConfigError: It is no DNS label (RFC 1123).
    """
    if not _LABEL.fullmatch(name) or len(name) > _MOST_LABEL:
        takes = f"lower-case letters, digits and '-' (not at the ends), at most {_MOST_LABEL}"
        raise ConfigError(refusal(option, takes, name, write))
    return name


def check_subdomain(name: str, *, option: str, write: str) -> str:
    """Returns a name that may have several parts divided by dots, such as that of a claim or a secret.

    Raises:
        ConfigError: It is no DNS subdomain (RFC 1123).
    """
    if not _SUBDOMAIN.fullmatch(name) or len(name) > _MOST_SUBDOMAIN:
        takes = f"lower-case letters, digits, '-' and '.' (not at the ends), at most {_MOST_SUBDOMAIN}"
        raise ConfigError(refusal(option, takes, name, write))
    return name


def check_image(image: str) -> str:
    """Returns the reference of an image.

    Raises:
        ConfigError: It is none that a container runtime takes.
    """
    if not _IMAGE.fullmatch(image):
        takes = "a reference such as registry/path:tag, in lower case and without spaces"
        raise ConfigError(refusal("--image", takes, image, "--image registry.example.com/team/jaxtrain:0.1.0-cuda12"))
    return image


def moving_image(image: str) -> bool:
    """Returns whether a reference may stand for another image tomorrow: it has no tag, or `latest`, and no digest."""
    last = image.rpartition("/")[2]
    return "@" not in image and (":" not in last or last.endswith(":latest"))


def check_memory(text: str) -> str:
    """Returns an amount of memory.

    Raises:
        ConfigError: It is none that Kubernetes takes.
    """
    number = re.sub(r"[A-Za-z]+", "", text)
    # Less than a MiB is a unit that was forgotten.
    if not _QUANTITY.fullmatch(text) or not float(number) or (number == text and float(text) < 2**20):
        raise ConfigError(refusal("--memory", "a number of bytes above 0 with a unit", text, "--memory 64Gi"))
    return text


def check_cpus(text: str) -> str:
    """Returns a number of CPUs.

    Raises:
        ConfigError: It is none that Kubernetes takes.
    """
    if not _CPUS.fullmatch(text) or not float(text.rstrip("m")):
        raise ConfigError(refusal("--cpus", "a number of CPUs above 0", text, "--cpus 8"))
    return text


def check_path(path: str, *, option: str) -> str:
    """Returns an absolute path inside a container.

    Raises:
        ConfigError: It is relative, the root, or holds parts that are not written out.
    """
    parts = path.split("/")
    if (
        not path.startswith("/")
        or {".", ".."} & set(parts)
        or not path.strip("/")
        or ":" in path
        or not path.isprintable()
    ):
        takes = "an absolute path inside the container, which is not the root and has no '..' or ':'"
        raise ConfigError(refusal(option, takes, path, "--volume runs:/runs"))
    return path if len(path) == 1 else path.rstrip("/")
