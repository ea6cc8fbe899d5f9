"""`jaxtrain submit job` and `jaxtrain submit jobset`: a training as manifests for Kubernetes. No jax here."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.commands.command import count, process_count, step_number
from jaxtrain.commands.shared_arguments import add_config
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark

if TYPE_CHECKING:
    from jaxtrain.config.checkpoint import CheckpointConfig
    from jaxtrain.submit.kubernetes import KubernetesRun

# Numbers of a manifest have 32 bits; a Job counts the starts of all its pods.
_MOST_RESTARTS = 2**31 - 1


def kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain submit job` and `jaxtrain submit jobset`."""
    add_config(parser)
    parser.add_argument(
        "--image", required=True, metavar="IMAGE", help="container image with jaxtrain (see containers/)"
    )
    parser.add_argument(
        "--hosts", type=process_count, metavar="N", help="machines, each with one pod; default: 1, or the slice's"
    )
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--gpus", type=process_count, metavar="K", help="NVIDIA GPUs per host; default: none, on CPUs")
    devices.add_argument(
        "--tpu", metavar="TYPE/TOPOLOGY", help="a TPU slice of Google Kubernetes Engine, as in v5e/4x4"
    )
    parser.add_argument("--cpus", metavar="N", help="CPUs per host to ask for")
    parser.add_argument("--memory", metavar="SIZE", help="memory per host, as in 64Gi")
    parser.add_argument("--queue", metavar="QUEUE", help="local queue of Kueue that admits the run")
    parser.add_argument(
        "--namespace", default="default", metavar="NS", help="namespace of all objects; default: default"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the job; default: the config's")
    parser.add_argument(
        "--grace", type=count, default=600, metavar="SECONDS", help="time to save before a pod is killed; default: 600"
    )
    parser.add_argument(
        "--restarts", type=step_number, default=3, metavar="N", help="starts after a failure; default: 3"
    )
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="mount a persistent volume claim; may repeat",
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="directory of the run in the pods; default: <first volume>/<name>"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable; may repeat"
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="SECRET",
        help="a Secret whose keys become variables; may repeat",
    )
    parser.add_argument("--service-account", metavar="NAME", help="an account that exists; default: one is made")
    parser.add_argument("--replicas", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the manifests to FILE; default: print them")
    parser.add_argument("--run", action="store_true", help="also give them to kubectl")


def submit_job(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain submit job`."""
    return _submit(arguments, jobset=False)


def submit_jobset(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain submit jobset`."""
    return _submit(arguments, jobset=True)


def _submit(arguments: argparse.Namespace, *, jobset: bool) -> int:
    from jaxtrain.config.secrets import redacted_text
    from jaxtrain.submit import names
    from jaxtrain.submit.jobs import job_manifests, jobset_manifests
    from jaxtrain.submit.kubectl import apply_manifests, manifests_text
    from jaxtrain.submit.kubernetes import KubernetesRun, most_name_length, parse_environment, parse_volumes
    from jaxtrain.submit.pod_training import pod_training
    from jaxtrain.submit.tpu_slices import tpu_slice
    from jaxtrain.submit.training import check_devices

    if arguments.replicas is not None:
        raise ConfigError(
            f"--replicas {arguments.replicas}: each replica would be a cluster of its own that trains alone beside the "
            "others; write --hosts with the number of all machines"
        )
    names.check_image(arguments.image)
    tpu = None if arguments.tpu is None else tpu_slice(arguments.tpu, hosts=arguments.hosts)
    hosts = tpu.hosts if tpu is not None else arguments.hosts or 1
    volumes = parse_volumes(arguments.volume)
    training = pod_training(
        arguments.config, arguments.overrides, run_dir=arguments.run_dir, folder=volumes[0].path if volumes else None
    )
    name = arguments.name or names.as_name(training.loaded.name)
    run = KubernetesRun(
        name=names.check_job_name(name, most=most_name_length(hosts, jobset=jobset)),
        image=arguments.image,
        words=training.words,
        hosts=hosts,
        namespace=names.check_label(arguments.namespace, option="--namespace", write="--namespace research"),
        gpus=arguments.gpus,
        tpu=tpu,
        cpus=None if arguments.cpus is None else names.check_cpus(arguments.cpus),
        memory=None if arguments.memory is None else names.check_memory(arguments.memory),
        queue=None
        if arguments.queue is None
        else names.check_label(arguments.queue, option="--queue", write="--queue gpus"),
        grace_seconds=arguments.grace,
        restarts=arguments.restarts,
        volumes=volumes,
        environment=parse_environment(arguments.env),
        secrets=tuple(
            names.check_subdomain(one, option="--secret", write="--secret wandb") for one in arguments.secret
        ),
        service_account=None
        if arguments.service_account is None
        else names.check_subdomain(
            arguments.service_account, option="--service-account", write="--service-account trainer"
        ),
        config_file=training.config_file,
    )
    check_devices(training.loaded, run.num_devices)
    if run.restarts * run.hosts > _MOST_RESTARTS:
        raise ConfigError(
            f"--restarts {run.restarts} on {hosts} hosts are more than Kubernetes counts; use at most "
            f"{_MOST_RESTARTS // hosts}"
        )
    for note in _notes(run, training.run_dir, training.loaded.config.checkpoint):
        print_remark(f"jaxtrain: {note}")
    kind = "jobset" if jobset else "job"
    about = f"-n {run.namespace}"
    header = [
        f"jaxtrain {' '.join(shlex.quote(word) for word in training.words)}, on {hosts} host{'s' if hosts > 1 else ''}",
        "To start it:  kubectl apply -f FILE",
        # By default kubectl returns before the pods have ended.
        f"To stop it (it saves first):  kubectl delete {kind} {name} {about} --cascade=foreground",
        f"What process 0 prints:  kubectl logs -f {about} -l app.kubernetes.io/instance={name}",
    ]
    manifests = jobset_manifests(run) if jobset else job_manifests(run)
    text = manifests_text(manifests, header=[redacted_text(line) for line in header])
    if arguments.output is not None:
        _write(arguments.output, text)
    if arguments.run:
        apply_manifests(text, run)
    elif arguments.output is None:
        print(text, end="")
    return 0


def _notes(run: "KubernetesRun", run_dir: str, keep: "CheckpointConfig") -> list[str]:
    from jaxtrain.submit.names import moving_image

    notes = []
    if moving_image(run.image):
        notes.append(
            f"--image {run.image} has no fixed tag: a pod that starts later may get another version, and processes of "
            "different versions do not train together"
        )
    if not _is_on_volume(run, run_dir):
        then = (
            "the run starts anew" if keep.directory is None else f"{keep.directory} then counts as that of another run"
        )
        notes.append(
            f"the run directory {run_dir} lies on no volume and is lost with its pod ({then}); add --volume CLAIM:PATH "
            "of a claim that all hosts may write to (ReadWriteMany)"
        )
    kept = {"directory": "every new pod begins at step 0", "mirror": "no later pod finds the copies"}
    for key, then in kept.items():
        place = getattr(keep, key)
        if place is not None and "://" not in place and not _is_on_volume(run, place):
            notes.append(
                f"checkpoint.{key}={place} lies on no volume and is lost with its pod ({then}); name a folder below "
                "the PATH of a --volume, or an address such as gs://bucket/run"
            )
    return notes


def _is_on_volume(run: "KubernetesRun", path: str) -> bool:
    normal = os.path.normpath(path)
    return any(normal == volume.path or normal.startswith(f"{volume.path.rstrip('/')}/") for volume in run.volumes)


def _write(output: str, text: str) -> None:
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"-o {output}: cannot be written: {error.strerror or os.strerror(error.errno or 0)}"
        ) from None
