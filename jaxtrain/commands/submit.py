"""`jaxtrain submit`: scripts and manifests with which the scheduler of a cluster trains a config. No jax here."""

import argparse
import dataclasses
import functools
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxtrain.commands.table import add_shared, count, process_count, step_number
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.submit.slurm import RESTARTED, SIGNALS, SlurmJob, ask_sbatch, num_gpus, slurm_script


def slurm_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain submit slurm`."""
    add_shared(parser, "config", "overrides")
    add = parser.add_argument
    add("--nodes", type=process_count, default=1, metavar="N", help="number of nodes; default: 1")
    add("--gpus-per-node", metavar="N", help="GPUs per node, as in 8 or a100:8; default: none")
    add("--tasks-per-node", type=process_count, default=1, metavar="N", help="processes per node; default: 1")
    add("--cpus-per-task", type=process_count, metavar="N", help="CPU cores per process")
    add("--mem", metavar="SIZE", help="memory per node, as in 64G; 0: all of it")
    add("--time", metavar="TIME", help="time limit of the job: 90 (minutes), 12:00:00 or 2-0 (days-hours)")
    add("--partition", metavar="NAME", help="partition; default: the cluster's default")
    add("--account", metavar="NAME", help="account to charge")
    add("--qos", metavar="NAME", help="quality of service")
    add("--constraint", metavar="FEATURE", help="features that the nodes must have")
    add("--job-name", dest="name", metavar="NAME", help="name of the job; default: the config's name")
    add("--output", metavar="FILE", help="file for the job's output; default: NAME-%%j.out (%%j: job id)")
    add("--run-dir", metavar="DIR", help="run directory; default: runs/<name>, or CONFIG if a run")
    add("--signal", choices=SIGNALS, default="TERM", help="signal sent before the time limit; default: TERM")
    add("--warning-seconds", type=count, default=120, metavar="S", help="seconds from signal to limit; default: 120")
    add("--max-restarts", type=step_number, default=10, metavar="N", help="maximum number of restarts; default: 10")
    add(
        "--restart-at",
        type=lambda text: tuple(map(step_number, text.split(","))),
        default=RESTARTED,
        metavar="CODES",
        help="exit codes that restart the job; default: 70,75,134 (137: a process was killed)",
    )
    add_each = functools.partial(add, action="append", default=[])
    add_each("--setup", metavar="LINE", help="shell line to run first, as in 'source .venv/bin/activate'; may repeat")
    add_each("--sbatch", metavar="OPTION", help="extra sbatch option, as in --sbatch=--exclusive; may repeat")
    add_each("--srun", metavar="OPTION", help="extra srun option, as in --srun=--mpi=none; may repeat")
    add_shared(parser, "--emulate")
    add("-o", "--script", metavar="FILE", help="write the script to FILE; default: print it")
    add("--run", action="store_true", help="submit the script with sbatch and print the job id")


def submit_slurm(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain submit slurm`.

    Raises:
        ConfigError: the config or an option is wrong, or Slurm refused the job.
    """
    from jaxtrain.submit.training import job_training

    overrides, run_dir = arguments.overrides, arguments.run_dir
    job = SlurmJob(**{**_values(SlurmJob, arguments), "folder": Path.cwd(), "output": Path()})
    emulate = arguments.emulate
    per_node = num_gpus(job) if emulate is None else job.tasks_per_node * emulate
    devices = None if per_node is None else job.nodes * per_node
    training = job_training(arguments.config, overrides, run_dir=run_dir, emulate=emulate, num_devices=devices)
    name = job.name or training.name
    # A folder's own % would be read as a pattern.
    output = arguments.output or re.sub(r"[/\\]", "-", name).replace("%", "%%") + "-%j.out"
    job = dataclasses.replace(job, name=name, output=Path(str(job.folder).replace("%", "%%")) / output)
    # The line that sets up the environment also chooses its jaxtrain.
    program = ("jaxtrain",) if job.setup else (sys.executable, "-m", "jaxtrain")
    text = slurm_script(job, [*program, *training.words], written_by=shlex.join(["jaxtrain", *sys.argv[1:]]))
    number_of_job = ask_sbatch(job, text, submit=arguments.run)
    if arguments.script is not None:
        _write(text, arguments.script)
    if number_of_job is not None:
        output = str(job.output).replace("%j", number_of_job)
        print_remark(f"jaxtrain: submitted; output: {output}; run directory: {training.run_dir}")
        print(number_of_job)
    elif arguments.script is None:
        print(text, end="")
    return 0


def kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain submit job` and `jaxtrain submit jobset`."""
    add_shared(parser, "config", "overrides")
    add = parser.add_argument
    add("--image", required=True, metavar="IMAGE", help="container image with jaxtrain (see containers/)")
    add("--hosts", type=process_count, metavar="N", help="hosts, one pod each; default: 1, or the slice's")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--gpus", type=process_count, metavar="K", help="NVIDIA GPUs per host; default: none (CPUs)")
    devices.add_argument(
        "--tpu", metavar="TYPE/TOPOLOGY", help="a TPU slice of Google Kubernetes Engine, as in v5e/4x4"
    )
    add("--cpus", metavar="N", help="CPUs per host to request")
    add("--memory", metavar="SIZE", help="memory per host to request, as in 64Gi")
    add("--queue", metavar="QUEUE", help="Kueue local queue to submit to")
    add("--namespace", default="default", metavar="NS", help="namespace of all objects; default: default")
    add("--name", metavar="NAME", help="name of the job; default: the config's")
    add("--grace", dest="grace_seconds", type=count, default=600, metavar="S", help="seconds to save in; default: 600")
    add("--restarts", type=step_number, default=3, metavar="N", help="maximum number of restarts; default: 3")
    add("--run-dir", metavar="DIR", help="run directory in the pods; default: <first volume>/<name>")
    add_each = functools.partial(add, action="append", default=[])
    add_each("--volume", metavar="CLAIM:PATH", help="mount a persistent volume claim; may repeat")
    add_each("--env", metavar="NAME=VALUE", help="environment variable; may repeat")
    add_each("--secret", metavar="SECRET", help="Secret whose keys become environment variables; may repeat")
    add("--service-account", metavar="NAME", help="existing service account; default: create one")
    add("-o", "--output", metavar="FILE", help="write the manifests to FILE; default: print them")
    add("--run", action="store_true", help="also apply them with kubectl")


def submit_job(arguments: argparse.Namespace, *, jobset: bool = False) -> int:
    """Runs `jaxtrain submit job` or `jaxtrain submit jobset`."""
    from jaxtrain.submit import kubernetes
    from jaxtrain.submit.tpu import tpu_slice
    from jaxtrain.submit.training import pod_training

    tpu = None if arguments.tpu is None else tpu_slice(arguments.tpu, hosts=arguments.hosts)
    hosts = tpu.hosts if tpu is not None else arguments.hosts or 1
    volumes = kubernetes.parse_volumes(arguments.volume)
    environment = kubernetes.parse_environment(arguments.env)
    per_host = arguments.gpus or int(environment.get("JAX_NUM_CPU_DEVICES", "1"))
    devices = hosts * per_host if tpu is None else tpu.num_devices
    folder, run_dir = next(iter(volumes), "runs"), arguments.run_dir
    training = pod_training(arguments.config, arguments.overrides, run_dir=run_dir, folder=folder, num_devices=devices)
    name = arguments.name or re.sub(r"[^a-z0-9]+", "-", training.name.lower()).strip("-")
    values = {
        **_values(kubernetes.KubernetesRun, arguments),
        **{"name": name, "words": training.words, "hosts": hosts, "tpu": tpu, "config_file": training.config_file},
        **{"volumes": volumes, "environment": environment, "secrets": arguments.secret},
    }
    run = kubernetes.KubernetesRun(**values)
    if not any(f"{training.run_dir}/".startswith(f"{path}/") for path in volumes):
        print_remark(
            f"jaxtrain: the run directory {training.run_dir} is on no volume and is lost with its pod; add --volume "
            "CLAIM:PATH with a claim that all hosts can write to (ReadWriteMany)"
        )
    kind, about = "jobset" if jobset else "job", f"-n {run.namespace}"
    header = [
        f"jaxtrain {shlex.join(training.words)}, on {hosts} host{'s' if hosts > 1 else ''}",
        "To start it:  kubectl apply -f FILE",
        # By default kubectl returns before the pods have ended.
        f"To stop it (it saves first):  kubectl delete {kind} {name} {about} --cascade=foreground",
        f"What process 0 prints:  kubectl logs -f {about} -l app.kubernetes.io/instance={name}",
    ]
    text = kubernetes.manifests_text(kubernetes.manifests(run, jobset=jobset), header=header)
    if arguments.output is not None:
        _write(text, arguments.output)
    if arguments.run:
        kubernetes.apply_manifests(text)
    elif arguments.output is None:
        print(text, end="")
    return 0


submit_jobset = functools.partial(submit_job, jobset=True)


def _values(record: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that are fields of a record."""
    return {one.name: getattr(arguments, one.name) for one in dataclasses.fields(record) if one.name in arguments}


def _write(text: str, path: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}; name a file in a folder that exists") from None
    print_remark(f"wrote {path}")
