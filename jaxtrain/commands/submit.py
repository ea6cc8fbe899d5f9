"""`jaxtrain submit`: scripts and manifests with which the scheduler of a cluster trains a config. No jax here."""

import argparse
import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxtrain.commands.shared import write_output
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.submit import kubernetes
from jaxtrain.submit.slurm import SlurmJob, ask_sbatch, num_gpus, slurm_script
from jaxtrain.submit.tpu import tpu_slice
from jaxtrain.submit.training import job_training, pod_training


def submit_slurm(arguments: argparse.Namespace) -> int:
    """Write a Slurm batch script, or submit it; return 0.

    Raises:
        ConfigError: the config or an option is wrong, or Slurm refused the job.
    """
    emulate = arguments.emulate
    devices_per_node = num_gpus(arguments.gpus_per_node, arguments.tasks_per_node)
    if emulate is not None:
        devices_per_node = arguments.tasks_per_node * emulate
    training = job_training(
        arguments.config,
        arguments.overrides,
        run_dir=arguments.run_dir,
        emulate=emulate,
        num_devices=devices_per_node and arguments.nodes * devices_per_node,
    )
    name = arguments.name or training.name
    # A % of the name, or of the folder, would be read as a pattern.
    output = arguments.output or re.sub(r"[/\\]", "-", name).replace("%", "%%") + "-%j.out"
    folder = Path.cwd()
    output_path = Path(str(folder).replace("%", "%%")) / output
    job = _record(SlurmJob, arguments, name=name, folder=folder, output=output_path)
    # The line that sets up the environment also chooses its jaxtrain.
    program = ["jaxtrain"] if job.setup else [sys.executable, "-m", "jaxtrain"]
    script = slurm_script(job, [*program, *training.words], written_by=shlex.join(["jaxtrain", *sys.argv[1:]]))
    job_id = ask_sbatch(job, script, submit=arguments.run)
    if arguments.script is not None:
        write_output("-o", arguments.script, script)
    if job_id is not None:
        log = str(job.output).replace("%j", job_id)
        print_remark(f"jaxtrain: submitted; output: {log}; run directory: {training.run_dir}")
        print(job_id)
    elif arguments.script is None:
        print(script, end="")
    return 0


def submit_job(arguments: argparse.Namespace) -> int:
    """Write the manifests of a Kubernetes Job, or apply them; return 0."""
    return _submit_kubernetes(arguments, jobset=False)


def submit_jobset(arguments: argparse.Namespace) -> int:
    """Write the manifests of a Kubernetes JobSet, or apply them; return 0."""
    return _submit_kubernetes(arguments, jobset=True)


def _submit_kubernetes(arguments: argparse.Namespace, *, jobset: bool) -> int:
    volumes = kubernetes.parse_volumes(arguments.volume)
    environment = kubernetes.parse_environment(arguments.env)
    tpu = None
    hosts = arguments.hosts or 1
    num_devices = hosts * (arguments.gpus or int(environment.get("JAX_NUM_CPU_DEVICES", "1")))
    if arguments.tpu is not None:
        tpu = tpu_slice(arguments.tpu, hosts=arguments.hosts)
        hosts = tpu.hosts
        num_devices = tpu.num_devices
    training = pod_training(
        arguments.config,
        arguments.overrides,
        run_dir=arguments.run_dir,
        folder=next(iter(volumes), "runs"),
        num_devices=num_devices,
    )
    name = arguments.name or re.sub(r"[^a-z0-9]+", "-", training.name.lower()).strip("-")
    run = _record(
        kubernetes.KubernetesRun,
        arguments,
        name=name,
        words=training.words,
        hosts=hosts,
        tpu=tpu,
        volumes=volumes,
        environment=environment,
        secrets=arguments.secret,
        config_file=training.config_file,
    )
    if not any(f"{training.run_dir}/".startswith(f"{path}/") for path in volumes):
        print_remark(
            f"jaxtrain: the run directory {training.run_dir} is on no volume and is lost with its pod; add --volume "
            "CLAIM:PATH with a claim that all hosts can write to (ReadWriteMany)"
        )
    text = kubernetes.manifests_text(run, jobset=jobset)
    if arguments.output is not None:
        write_output("-o", arguments.output, text)
    if arguments.run:
        kubernetes.apply_manifests(text)
    elif arguments.output is None:
        print(text, end="")
    return 0


def _record(kind: Any, arguments: argparse.Namespace, **values: Any) -> Any:
    """Make a dataclass of the arguments that are fields of it, and of further values."""
    for field in dataclasses.fields(kind):
        if field.name in arguments and field.name not in values:
            values[field.name] = getattr(arguments, field.name)
    return kind(**values)
