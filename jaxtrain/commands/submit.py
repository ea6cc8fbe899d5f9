"""`jaxtrain submit`: scripts and manifests with which the scheduler of a cluster trains a config. No jax here."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.commands.command import count, number, process_count, step_number
from jaxtrain.commands.shared_arguments import add_config, add_emulate
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark
from jaxtrain.submit.slurm import RESTARTED, SIGNALS, SlurmJob, asked_gpus, check_job, num_gpus, slurm_script
from jaxtrain.submit.slurm_options import asks_for_gpus


def slurm_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxtrain submit slurm`."""
    add_config(parser)
    parser.add_argument("--nodes", type=process_count, default=1, metavar="N", help="number of nodes; default: 1")
    parser.add_argument("--gpus-per-node", metavar="N", help="GPUs of each node, as 8 or a100:8; default: none")
    parser.add_argument(
        "--tasks-per-node", type=process_count, default=1, metavar="N", help="processes of each node; default: 1"
    )
    parser.add_argument("--cpus-per-task", type=process_count, metavar="N", help="CPU cores of each process")
    parser.add_argument("--mem", metavar="SIZE", help="memory of each node, as 64G; 0: all of it")
    parser.add_argument("--time", metavar="TIME", help="limit of the job: 90 (minutes), 12:00:00 or 2-0 (days-hours)")
    parser.add_argument("--partition", metavar="NAME", help="partition; default: the cluster's")
    parser.add_argument("--account", metavar="NAME", help="account that pays")
    parser.add_argument("--qos", metavar="NAME", help="quality of service")
    parser.add_argument("--constraint", metavar="FEATURE", help="features that the nodes must have")
    parser.add_argument("--job-name", metavar="NAME", help="default: the name of the config")
    parser.add_argument(
        "--output", metavar="FILE", help="what the job prints; default: NAME-%%j.out, %%j being its number"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="directory of the run; default: runs/<name>, or that run")
    parser.add_argument(
        "--signal", choices=SIGNALS, default="TERM", help="what warns the processes before the limit; default: TERM"
    )
    parser.add_argument(
        "--warning-seconds", type=count, default=120, metavar="S", help="how long before the limit; default: 120"
    )
    parser.add_argument(
        "--max-restarts", type=step_number, default=10, metavar="N", help="starts after the first; default: 10"
    )
    parser.add_argument(
        "--restart-at",
        type=_codes,
        default=RESTARTED,
        metavar="CODES",
        help="exit codes after which the job starts again; default: 70,75 (137: a process was killed)",
    )
    parser.add_argument(
        "--mtbf-hours",
        type=number,
        metavar="H",
        help="mean hours between failures of the whole job: sets checkpoint.every_minutes by Young's formula",
    )
    parser.add_argument(
        "--save-seconds", type=number, metavar="S", help="what a save costs; default: as measured in the run directory"
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="shell before the command, as 'source .venv/bin/activate'",
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="one more, as --sbatch=--exclusive"
    )
    parser.add_argument("--srun", action="append", default=[], metavar="OPTION", help="one more, as --srun=--mpi=none")
    add_emulate(parser)
    parser.add_argument("-o", "--script", metavar="FILE", help="write the script to FILE; default: print it")
    parser.add_argument(
        "--run", action="store_true", help="submit the script with sbatch; prints the number of the job"
    )


def submit_slurm(arguments: argparse.Namespace) -> int:
    """Runs `jaxtrain submit slurm`.

    Raises:
        ConfigError: the config or an option is wrong, the cluster cannot run such a job, or it refused it.
    """
    from jaxtrain.submit.slurm_cluster import ask_cluster, check_fits, submit_script
    from jaxtrain.submit.training import checked_training

    folder, nodes, tasks = Path.cwd(), arguments.nodes, arguments.tasks_per_node
    asked = _job(arguments, name="jaxtrain", folder=folder)
    check_job(asked)
    gpus, emulated = num_gpus(asked), arguments.emulate
    has_gpus = gpus is not None or asks_for_gpus(asked.sbatch_options)
    if has_gpus and emulated is not None:
        option, _ = asked_gpus(asked) or ("--sbatch", "")
        raise ConfigError(f"--emulate {emulated} trains on the CPU, and {option} asks for GPUs; leave out one")
    per_node = tasks * emulated if emulated is not None else gpus
    training = checked_training(
        arguments.config,
        [*arguments.overrides, *_interval(arguments)],
        run_dir=arguments.run_dir,
        emulate=emulated,
        num_devices=None if per_node is None else nodes * per_node,
    )
    job = _job(arguments, name=training.loaded.name, folder=folder)
    check_job(job)
    found = ask_cluster()
    if isinstance(found, str):
        print_remark(f"jaxtrain: not compared with a cluster: {found}")
    else:
        check_fits(job, found)
    if has_gpus and per_node is None:
        print_remark(
            "jaxtrain: the GPUs that --sbatch asks for are not counted, nor the degrees of parallel compared with "
            "them; ask by --gpus-per-node for that"
        )
    elif per_node is None:
        print_remark(
            "jaxtrain: without --gpus-per-node the job asks for no GPU, and every process trains on its CPU cores"
        )
    if job.cpus_per_task is None:
        print_remark(
            "jaxtrain: without --cpus-per-task Slurm decides, often for 1 core: compiling and data take several"
        )
    # The line that sets up the environment also chooses its jaxtrain.
    program = ("jaxtrain",) if job.setup else (sys.executable, "-m", "jaxtrain")
    typed = sys.argv[1:] if sys.argv[1:2] == ["submit"] else ["submit", "slurm", arguments.config]
    text = slurm_script(job, [*program, *training.words], written_by=shlex.join(["jaxtrain", *typed]))
    if arguments.script is not None:
        _write(text, arguments.script)
    if arguments.run:
        number_of_job = submit_script(text)
        output = str(job.output).replace("%j", number_of_job)
        print_remark(f"jaxtrain: submitted; output: {output}; run directory: {training.run_dir}")
        print(number_of_job)
    elif arguments.script is None:
        print(text, end="")
    return 0


def _codes(text: str) -> tuple[int, ...]:
    """Reads exit codes, divided by commas."""
    return tuple(step_number(code) for code in text.split(","))


def _job(arguments: argparse.Namespace, *, name: str, folder: Path) -> SlurmJob:
    name = arguments.job_name or name
    # A folder's own % would be read as a pattern.
    literal = str(folder).replace("%", "%%")
    output = arguments.output or "".join("-" if one in "/\\" else one for one in name).replace("%", "%%") + "-%j.out"
    return SlurmJob(
        name=name,
        folder=folder,
        output=Path(os.path.normpath(literal / local_path(output, what="--output"))),
        nodes=arguments.nodes,
        tasks_per_node=arguments.tasks_per_node,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_task=arguments.cpus_per_task,
        mem=arguments.mem,
        partition=arguments.partition,
        account=arguments.account,
        qos=arguments.qos,
        constraint=arguments.constraint,
        time=arguments.time,
        signal=arguments.signal,
        warning_seconds=arguments.warning_seconds,
        most_restarts=arguments.max_restarts,
        restarted=arguments.restart_at,
        setup=arguments.setup,
        sbatch_options=arguments.sbatch,
        srun_options=arguments.srun,
    )


def _interval(arguments: argparse.Namespace) -> Sequence[str]:
    """The setting for the time between two saves, where it is asked for.

    Raises:
        ConfigError: it is set otherwise as well, or what a save costs is not known.
    """
    if arguments.mtbf_hours is None:
        if arguments.save_seconds is not None:
            raise ConfigError("--save-seconds is about the time between saves; add --mtbf-hours, as in --mtbf-hours 24")
        return ()
    from jaxtrain.config import load_config
    from jaxtrain.run.folder import folder_of
    from jaxtrain.submit.interval import measured_save_seconds, save_every_minutes

    if any(word.startswith("checkpoint.every_minutes=") for word in arguments.overrides):
        raise ConfigError("--mtbf-hours sets checkpoint.every_minutes, which is set as well; leave out one of the two")
    seconds, source = arguments.save_seconds, "given by --save-seconds"
    if seconds is None:
        loaded = load_config(arguments.config, overrides=arguments.overrides, weights=False)
        folder = folder_of(loaded, arguments.run_dir)
        seconds, source = measured_save_seconds(folder), f"measured in {folder}"
        if seconds is None:
            raise ConfigError(
                f"--mtbf-hours needs what a save costs, and {folder} holds no run with two saves or more; add "
                "--save-seconds, as in --save-seconds 30"
            )
    minutes = save_every_minutes(save_seconds=seconds, mtbf_hours=arguments.mtbf_hours)
    print_remark(
        f"jaxtrain: checkpoint.every_minutes={minutes:g} by Young's formula, from {seconds:.3g} s per save ({source}) "
        f"and {arguments.mtbf_hours:g} h between failures"
    )
    return (f"checkpoint.every_minutes={minutes:g}",)


def _write(text: str, path: str) -> None:
    """Writes the script.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = local_path(path, what="-o")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"-o {path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from None
    print_remark(f"jaxtrain: wrote {path}; submit it with: sbatch {shlex.quote(path)}")
