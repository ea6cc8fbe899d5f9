"""The commands of the command line: summary, example, options, and the function that runs each. No jax here.

The functions are imported when a command runs, so that `--help` answers at once.
"""

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NoReturn

from jaxtrain.errors import ConfigError
from jaxtrain.submit.slurm import RESTARTED, SIGNALS

# The names of an argument, and what else `add_argument` takes.
Argument = tuple[list[str], dict[str, Any]]


class Command(argparse.ArgumentParser):
    """One command and its options; a usage error is one line.

    Attributes:
        summary: its line in the help.
        example: words after `jaxtrain` that run it.
        function: `module.function` of `jaxtrain.commands`, imported when the command runs.
    """

    summary: str
    example: str
    function: str

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message.removeprefix('argument ')}; see '{self.prog} --help'")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command, and return its exit code."""
        module, _, attribute = self.function.partition(".")
        return getattr(importlib.import_module(f"jaxtrain.commands.{module}"), attribute)(arguments)


COMMANDS: dict[str, Command] = {}


def _command(
    name: str,
    summary: str,
    function: str,
    example: str,
    *arguments: Argument | list[Argument],
    usage: str | None = None,
) -> None:
    """Add a command of one or two words to the table; it takes at most one of a list of arguments."""
    command = Command(
        prog=f"jaxtrain {name}",
        usage=usage,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example: jaxtrain {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.summary = summary
    command.example = example
    command.function = function
    COMMANDS[name] = command
    for argument in arguments:
        if isinstance(argument, list):
            group = command.add_mutually_exclusive_group()
            for names, settings in argument:
                group.add_argument(*names, **settings)
        else:
            names, settings = argument
            command.add_argument(*names, **settings)


def option(names: str, metavar: str | None, about: str, **settings: Any) -> Argument:
    """Describe an argument with a value; `names` are those of an option (`-o --output`), or a positional one's."""
    return names.split(), {"metavar": metavar, "help": about, **settings}


def repeated(names: str, metavar: str, about: str) -> Argument:
    """Describe an option that may be given several times."""
    return option(names, metavar, f"{about}; may repeat", action="append", default=[])


def flag(name: str, about: str) -> Argument:
    """Describe an option without a value."""
    return [name], {"action": "store_true", "help": about}


def whole_number(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return read


count = whole_number(1)
process_count = whole_number(1, 4096)
step_number = whole_number(0)


def tokens(text: str) -> float:
    """Read a number of tokens: `15T`, `1.5B`, `300M`, `10e9`."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    return float(text) if factor is None else factor * float(text[:-1])


def exit_codes(text: str) -> list[int]:
    """Read exit codes with commas between them: `70,75`."""
    return [step_number(code) for code in text.split(",")]


# Arguments that several commands take.
CONFIG = option("config", "CONFIG", "shipped name (quickstart, ...), YAML file or run directory")
OVERRIDES = option("overrides", "key=value", "config keys to set, as in train.steps=100", nargs="*", default=())
RUN_DIR = option("run_dir", "RUN_DIR", "run directory, as in runs/quickstart")
TO_RUN_DIR = option("--run-dir", "DIR", "run directory; default: runs/<name>, or CONFIG if a run")
EMULATE = option("--emulate", "N", "emulate N CPU devices", type=process_count)
STEP = option("--step", "N", "checkpoint to load; default: the newest intact one", type=step_number)
JSON = flag("--json", "print JSON")
QUANTIZE = option(
    "--quantize",
    None,
    "quantize linear layers to int8 or to 4 bits (nf4); default: do not quantize",
    choices=("int8", "nf4"),
)
RESTARTS = option(
    "--restarts",
    "N",
    "restart up to N times after a failure, from the newest intact checkpoint; default: 0",
    type=step_number,
    default=0,
)
MODEL = "run directory, published model folder, GGUF file or adapter folder"


_command(
    "train",
    "train a model from a config, or resume its run",
    "train.run",
    "train quickstart train.steps=100 --run-dir runs/first",
    CONFIG,
    OVERRIDES,
    TO_RUN_DIR,
    option(
        "--resume",
        None,
        "auto (default): resume if there is a checkpoint; must: fail if there is none; never: start anew",
        choices=("auto", "must", "never"),
        default="auto",
    ),
    RESTARTS,
    EMULATE,
)

_command(
    "eval",
    "evaluate a run on held-out rows, or on lm-eval-harness tasks",
    "eval.run",
    "eval runs/first evaluation.max_batches=50",
    option("run_dir", "RUN_DIR", "run directory; with --tasks also a published model folder or GGUF file"),
    OVERRIDES,
    option(
        "--tasks", "FILE|NAME", "evaluate on lm-eval-harness tasks, as task.yaml or arc_easy,hellaswag (extra: harness)"
    ),
    option("--limit", "N", "with --tasks: documents per task; default: all", type=count),
    option("--shots", "N", "with --tasks: few-shot examples; default: the task's", type=step_number),
    flag("--chat", "with --tasks: apply the chat template"),
    option("--batch", "N", "with --tasks: batch size; default: chosen by length", type=count),
    QUANTIZE,
    STEP,
    EMULATE,
    JSON,
)

_command(
    "sample",
    "generate text with a run or a published model",
    "sample.run",
    "sample runs/first -p 'The class statement' -n 100",
    option("run_dir", "RUN|FOLDER", MODEL),
    [
        repeated("-p --prompt", "TEXT", "prompt; default: stdin"),
        repeated("--chat", "QUESTION", "chat message to answer"),
    ],
    option("-n --tokens", "N", "number of new tokens; default: 200, or as many as fit", type=count),
    option("--temperature", "T", "sampling temperature, 0 for greedy; default: 0.8", type=float, default=0.8),
    option("--top-k", "K", "sample from the K most likely tokens", type=count),
    option("--top-p", "P", "sample from the most likely tokens of total probability P", type=float),
    option("--min-p", "P", "leave out tokens below P times the highest probability", type=float),
    option("--repetition-penalty", "R", "penalty for repeated tokens; default: 1", type=float, default=1.0),
    repeated("--stop", "TEXT", "stop before this text"),
    option("--seed", "N", "random seed; default: 0", type=step_number, default=0),
    flag("--stream", "print the text of one prompt while it is generated; default: on a terminal"),
    QUANTIZE,
    STEP,
    EMULATE,
    JSON,
)

_command(
    "predict",
    "write a model's predictions for the rows of a file",
    "predict.run",
    "predict runs/first rows.csv --out classes.csv",
    RUN_DIR,
    option("file", "FILE", "table (.csv, .jsonl, .parquet), folder of images, or text file (.txt)"),
    option("--out", "FILE", "output file (.csv or .jsonl); default: CSV on standard output"),
    option("--batch", "N", "largest batch size; default: 64", type=count),
    flag("--probabilities", "add the probability of each class"),
    QUANTIZE,
    STEP,
    EMULATE,
    flag("--json", "print one JSON object per row instead of CSV"),
)

_command(
    "serve",
    "serve a run or a published model over an OpenAI-compatible HTTP API",
    "serve.run",
    "serve runs/first --port 8000",
    option("path", "RUN|FOLDER", MODEL),
    OVERRIDES,
    option("--host", "ADDRESS", "address; default: 127.0.0.1 (this machine only)", default="127.0.0.1"),
    option("--port", "N", "port, 0 for a free one; default: 8000", type=whole_number(0, 65535), default=8000),
    option("--api-key-file", "FILE", "file with the API key of clients; default: $JAXTRAIN_API_KEY"),
    option("--name", "NAME", "model name that clients ask for; default: the folder's name"),
    option("--slots", "N", "answers generated at a time; default: 8", type=count, default=8),
    option("--length", "N", "maximum tokens of prompt and answer; default: up to 4096", type=count),
    option("--queue", "N", "maximum number of waiting answers; default: 256", type=count, default=256),
    option("--adapter", "DIR", "PEFT adapter to apply to a published model"),
    QUANTIZE,
    STEP,
    EMULATE,
)

_command(
    "import",
    "make a run from a published model",
    "published.run_import",
    "import models/SmolLM2-135M -o runs/smollm2",
    option("path", "FOLDER", "published model folder (config.json, safetensors), .gguf file or PEFT adapter"),
    OVERRIDES,
    option("-o --output", "RUN_DIR", "run directory to create", required=True),
    option("--base", "FOLDER", "base model of the adapter"),
    EMULATE,
)

_command(
    "export",
    "export a run for other tools, as safetensors or StableHLO",
    "published.run_export",
    "export runs/smollm2 -o models/mine --dtype bfloat16",
    option("run_dir", "RUN_DIR", "run directory, or published model folder or .gguf file to convert"),
    option("-o --output", "FOLDER", "folder to create", required=True),
    option(
        "--to",
        None,
        "published (default): config.json and safetensors; stablehlo: a program that runs without jaxtrain",
        choices=("published", "stablehlo"),
        default="published",
    ),
    option("--batch", "N", "rows per call of the program; default: any number if possible", type=count),
    option(
        "--dtype",
        None,
        "dtype of the tensors; default: that of the imported model, else float32",
        choices=("float32", "float16", "bfloat16"),
    ),
    option("--max-shard-size", "SIZE", "largest size of a file; default: 5GB"),
    flag("--merge", "merge the adapters into the base and write the whole model"),
    STEP,
    EMULATE,
)

_command(
    "report",
    "redraw a run's report, or compare several runs or a sweep",
    "runs.report",
    "report runs/first runs/second --output compare.html",
    option("run_dirs", "RUN_DIR", "run directories, or a sweep directory", nargs="+"),
    option("-o --output", "FILE", "page to write; default: report.html or compare.html"),
)

_command(
    "sweep",
    "train a config with several values of its keys, and compare the trials",
    "sweep.run",
    "sweep quickstart optimizer.learning_rate=1e-4,1e-3 train.steps=100 --run-dir runs/rates",
    option("config", "CONFIG", "shipped name (quickstart, ...) or YAML file"),
    option("overrides", "key=value", "a value for all trials, or v1,v2: every combination", nargs="+"),
    option("--run-dir", "DIR", "sweep directory; default: runs/<name>-sweep"),
    option("--jobs", "N", "trials to run at a time; default: 1", type=process_count, default=1),
)

_command(
    "launch",
    "run a command in several processes on this machine, as a cluster does",
    "launch.run",
    "launch --processes 2 --emulate 4 -- train quickstart train.steps=20",
    option("--processes", "N", "number of processes to start", type=process_count, required=True),
    option("--emulate", "M", "emulate M CPU devices in each process", type=process_count),
    RESTARTS,
    usage="jaxtrain launch --processes N [--emulate M] [--restarts N] -- COMMAND\n\n"
    "COMMAND: train CONFIG ..., python my.py ...",
)

_command(
    "submit slurm",
    "write a Slurm batch script that trains a config, or submit it",
    "submit.submit_slurm",
    "submit slurm llama3_8b train.steps=2000 --nodes 4 --gpus-per-node 8 --time 2-0",
    CONFIG,
    OVERRIDES,
    option("--nodes", "N", "number of nodes; default: 1", type=process_count, default=1),
    option("--gpus-per-node", "N", "GPUs per node, as in 8 or a100:8; default: none"),
    option("--tasks-per-node", "N", "processes per node; default: 1", type=process_count, default=1),
    option("--cpus-per-task", "N", "CPU cores per process", type=process_count),
    option("--mem", "SIZE", "memory per node, as in 64G; 0: all of it"),
    option("--time", "TIME", "time limit of the job: 90 (minutes), 12:00:00 or 2-0 (days-hours)"),
    option("--partition", "NAME", "partition; default: the cluster's default"),
    option("--account", "NAME", "account to charge"),
    option("--qos", "NAME", "quality of service"),
    option("--constraint", "FEATURE", "features that the nodes must have"),
    option("--job-name", "NAME", "name of the job; default: the config's name", dest="name"),
    option("--output", "FILE", "file for the job's output; default: NAME-%%j.out (%%j: job id)"),
    TO_RUN_DIR,
    option("--signal", None, "signal sent before the time limit; default: TERM", choices=SIGNALS, default="TERM"),
    option("--warning-seconds", "S", "seconds from signal to limit; default: 120", type=count, default=120),
    option("--max-restarts", "N", "maximum number of restarts; default: 10", type=step_number, default=10),
    option(
        "--restart-at",
        "CODES",
        "exit codes that restart the job; default: 70,75,134 (137: a process was killed)",
        type=exit_codes,
        default=RESTARTED,
    ),
    repeated("--setup", "LINE", "shell line to run first, as in 'source .venv/bin/activate'"),
    repeated("--sbatch", "OPTION", "extra sbatch option, as in --sbatch=--exclusive"),
    repeated("--srun", "OPTION", "extra srun option, as in --srun=--mpi=none"),
    EMULATE,
    option("-o --script", "FILE", "write the script to FILE; default: print it"),
    flag("--run", "submit the script with sbatch and print the job id"),
)

for _kind, _summary, _devices in (
    ("job", "write a Kubernetes Job for training", "--hosts 2 --gpus 4"),
    ("jobset", "write a Kubernetes JobSet, which restarts all hosts of a run together", "--tpu v5e/2x4"),
):
    _command(
        f"submit {_kind}",
        _summary,
        f"submit.submit_{_kind}",
        f"submit {_kind} quickstart --image example.com/jaxtrain:0.1.0 {_devices} --volume runs:/runs",
        CONFIG,
        OVERRIDES,
        option("--image", "IMAGE", "container image with jaxtrain (see containers/)", required=True),
        option("--hosts", "N", "hosts, one pod each; default: 1, or the slice's", type=process_count),
        [
            option("--gpus", "K", "NVIDIA GPUs per host; default: none (CPUs)", type=process_count),
            option("--tpu", "TYPE/TOPOLOGY", "a TPU slice of Google Kubernetes Engine, as in v5e/4x4"),
        ],
        option("--cpus", "N", "CPUs per host to request"),
        option("--memory", "SIZE", "memory per host to request, as in 64Gi"),
        option("--queue", "QUEUE", "Kueue local queue to submit to"),
        option("--namespace", "NS", "namespace of all objects; default: default", default="default"),
        option("--name", "NAME", "name of the job; default: the config's"),
        option("--grace", "S", "seconds to save in; default: 600", dest="grace_seconds", type=count, default=600),
        option("--restarts", "N", "maximum number of restarts; default: 3", default=3, type=step_number),
        option("--run-dir", "DIR", "run directory in the pods; default: <first volume>/<name>"),
        repeated("--volume", "CLAIM:PATH", "mount a volume claim"),
        repeated("--env", "NAME=VALUE", "environment variable"),
        repeated("--secret", "SECRET", "Secret whose keys become environment variables"),
        option("--service-account", "NAME", "existing service account; default: create one"),
        option("-o --output", "FILE", "write the manifests to FILE; default: print them"),
        flag("--run", "also apply them with kubectl"),
    )

_command(
    "plan",
    "estimate a config's memory, time and cost on hardware that you need not have",
    "plan.run",
    "plan llama3_8b --on h100x8,v5p-8",
    option("config", "CONFIG", "shipped name (llama3_8b, ...) or YAML file", nargs="?"),
    OVERRIDES,
    option("--on", "HARDWARE", "such as h100x8,v5e-16,rtx4090; default: this machine's CPU", default="cpu"),
    flag("--list", "list the hardware with its figures"),
    option("--hardware", "FILE", "YAML file whose hardware or prices replace the shipped ones"),
    [
        flag("--analytic", "use formulas only, even if the compiler is installed"),
        flag("--exact", "fail if no compiler can check the figures"),
    ],
    flag("--search", "try every layout, and rank those that fit by step time"),
    flag("--largest-batch", "find the largest global batch that fits"),
    option("--tokens", "N", "print the cost of training on N tokens, as in 15T or 1.5B", type=tokens),
    option("--config", "FILE", "write the best plan's config to FILE", dest="config_out"),
    JSON,
)

_command(
    "bench",
    "measure this machine, and how much of its speed a config's training step reaches",
    "bench.run",
    "bench bench_cpu --json bench.json",
    option("config", "CONFIG", "shipped name or file; default: bench_cpu", nargs="?", default="bench_cpu"),
    OVERRIDES,
    option("--json", "FILE", "write all measurements to FILE"),
    repeated("--skip", "PART", "leave out some of start,limits,step"),
    option("--seconds", "S", "time steps for S seconds, three at least; default: 10", type=float, default=10.0),
    EMULATE,
)

_command(
    "config",
    "list the shipped configs, or show every key of one",
    "config.run",
    "config quickstart train.steps=100 --only train",
    option("config", "CONFIG", "shipped name, YAML file or run directory; default: list all", nargs="?"),
    OVERRIDES,
    [
        option("--only", "PREFIX", "print only the keys below PREFIX, as in optimizer"),
        flag("--yaml", "print the resolved config as YAML"),
        flag("--json-schema", "print the JSON schema of a config, for editors"),
        flag("--sharding", "print how each parameter is sharded over the mesh"),
    ],
    EMULATE,
)

_command(
    "doctor",
    "check versions, devices, caches and speed, and say how to fix each problem",
    "doctor.run",
    "doctor --emulate 8",
    EMULATE,
    JSON,
)

_command(
    "data prepare",
    "tokenize the text of a config into token shards",
    "data.run_prepare",
    "data prepare quickstart -o tokens",
    CONFIG,
    OVERRIDES,
    option("-o --output", "DIR", "folder for the token shards", required=True),
)

_command(
    "data show",
    "show rows as the model sees them, and which tokens have a loss",
    "data.run_show",
    "data show quickstart data.kind=chat --rows 1",
    CONFIG,
    OVERRIDES,
    option("--rows", "N", "number of rows; default: 2", type=count, default=2),
    JSON,
)

_command(
    "ckpt ls",
    "list the checkpoints of a run",
    "runs.run_ls",
    "ckpt ls runs/first --verify",
    RUN_DIR,
    flag("--verify", "read every array and compare it with its digest"),
    JSON,
)

_command(
    "ckpt show", "show what a checkpoint holds", "runs.run_show", "ckpt show runs/first --step 100", RUN_DIR, STEP, JSON
)
