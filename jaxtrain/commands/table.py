"""The verbs of the command line: a summary, an example, the options, and the function that does the work.

The work is imported when it is asked for, so that `--help` answers at once. No jax here.
"""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxtrain.errors import ConfigError

_MOST, _MOST_PROCESSES = 10**9, 4096


def whole(text: str, least: int, most: int) -> int:
    """Read a whole number from `least` to `most`."""
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def count(text: str) -> int:
    """Read a whole number of 1 or more."""
    return whole(text, 1, _MOST)


def process_count(text: str) -> int:
    """Read a number of processes or of emulated devices: 1 or more, and as many as a machine can start."""
    return whole(text, 1, _MOST_PROCESSES)


def step_number(text: str) -> int:
    """Read a whole number of 0 or more."""
    return whole(text, 0, _MOST)


def port_number(text: str) -> int:
    """Read a port, 0 for a free one."""
    return whole(text, 0, 65_535)


def tokens(text: str) -> float:
    """Read a number of tokens: `15T`, `1.5B`, `300M`, `10e9`."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    return float(text) if factor is None else factor * float(text[:-1])


_SHARED: dict[str, dict[str, Any]] = {
    "config": {"metavar": "CONFIG", "help": "shipped name (quickstart, ...), YAML file or run directory"},
    "overrides": {"metavar": "key=value", "nargs": "*", "help": "config keys to set, as in train.steps=100"},
    "run_dir": {"metavar": "RUN_DIR", "help": "run directory, as in runs/quickstart"},
    "--emulate": {"type": process_count, "metavar": "N", "help": "emulate N CPU devices"},
    "--step": {"type": step_number, "metavar": "N", "help": "checkpoint to load; default: the newest intact one"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--quantize": {
        "choices": ("int8", "nf4"),
        "help": "quantize linear layers to int8 or to 4 bits (nf4); default: do not quantize",
    },
}


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds arguments that several verbs take: `config`, `overrides`, `run_dir`, `--emulate`, `--step` and so on."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


class Parser(argparse.ArgumentParser):
    """The options of a verb, with an example; a usage error is one line."""

    example = ""

    def error(self, message: str) -> NoReturn:
        # A list that may be empty is never what is missing.
        missing = message.removeprefix("the following arguments are required: ").removesuffix(", key=value")
        said = f"{missing} is missing" if missing != message else message.removeprefix("argument ")
        raise ConfigError(f"{self.prog}: {said}; see '{self.prog} --help'")

    def format_help(self) -> str:
        """The help, with the example at its end."""
        return f"{super().format_help()}\nexample: jaxtrain {self.example}\n"

    def print_help(self, file: Any = None) -> None:
        """Prints the help; argparse itself says nothing where it cannot be written."""
        print(self.format_help(), end="", file=file, flush=True)


@dataclass(frozen=True)
class Command:
    """One verb: its line in the help, its options, and the function that runs it.

    `options`, where it is not None, adds the options that stand beside the work.
    """

    summary: str
    parser: Parser
    run: Callable[[argparse.Namespace], int]
    options: Callable[[argparse.ArgumentParser], None] | None = None


COMMANDS: dict[str, Command] = {}


def _later(target: str) -> Callable[[Any], Any]:
    """The function `module.function` of `jaxtrain.commands`, imported when it is called."""
    module, _, name = target.partition(".")

    def call(given: Any) -> Any:
        return getattr(importlib.import_module(f"jaxtrain.commands.{module}"), name)(given)

    return call


def _verb(name: str, summary: str, work: str, options: str | None = None) -> Parser:
    about = f"{summary[0].upper()}{summary[1:]}."
    parser = Parser(prog=f"jaxtrain {name}", description=about, allow_abbrev=False)
    COMMANDS[name] = Command(summary, parser, _later(work), None if options is None else _later(options))
    return parser


def _restarts(parser: argparse.ArgumentParser, metavar: str) -> None:
    about = f"restart up to {metavar} times after a failure, from the newest intact checkpoint; default: 0"
    parser.add_argument("--restarts", type=step_number, default=0, metavar=metavar, help=about)


def _training() -> None:
    parser = _verb("train", "train a model from a config, or resume its run", "train.run")
    parser.example = "train quickstart train.steps=100 --run-dir runs/first"
    add_shared(parser, "config", "overrides")
    parser.add_argument("--run-dir", metavar="DIR", help="run directory; default: runs/<name>, or CONFIG if a run")
    parser.add_argument(
        "--resume",
        default="auto",
        choices=("auto", "must", "never"),
        help="auto (default): resume if there is a checkpoint; must: fail if there is none; never: start anew",
    )
    _restarts(parser, "N")
    add_shared(parser, "--emulate")

    parser = _verb("eval", "evaluate a run on held-out rows, or on lm-eval-harness tasks", "eval.run")
    parser.example = "eval runs/first evaluation.max_batches=50"
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="run directory; with --tasks also a published model folder or GGUF file")
    add_shared(parser, "overrides")
    add(
        "--tasks",
        metavar="FILE|NAME",
        help="evaluate on lm-eval-harness tasks, as task.yaml or arc_easy,hellaswag (extra: harness)",
    )
    add("--limit", type=count, metavar="N", help="with --tasks: documents per task; default: all")
    add("--shots", type=step_number, metavar="N", help="with --tasks: few-shot examples; default: the task's")
    add("--chat", action="store_true", help="with --tasks: apply the chat template")
    add("--batch", type=count, metavar="N", help="with --tasks: batch size; default: chosen by length")
    add_shared(parser, "--quantize", "--step", "--emulate", "--json")


def _use() -> None:
    parser = _verb("sample", "generate text with a run or a published model", "sample.run")
    parser.example = "sample runs/first -p 'The class statement' -n 100"
    add = parser.add_argument
    add("run_dir", metavar="RUN|FOLDER", help="run directory, published model folder, GGUF file or adapter folder")
    prompts = parser.add_mutually_exclusive_group().add_argument
    prompts("-p", "--prompt", action="append", metavar="TEXT", help="prompt; may be repeated; default: stdin")
    prompts("--chat", action="append", metavar="QUESTION", help="chat message to answer; may be repeated")
    add("-n", "--tokens", type=count, metavar="N", help="number of new tokens; default: 200, or as many as fit")
    add("--temperature", type=float, default=0.8, metavar="T", help="sampling temperature, 0 for greedy; default: 0.8")
    add("--top-k", type=count, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens of total probability P")
    add("--min-p", type=float, metavar="P", help="leave out tokens below P times the highest probability")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="penalty for repeated tokens; default: 1")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add("--seed", type=step_number, default=0, metavar="N", help="random seed; default: 0")
    add("--stream", action="store_true", help="print text while it is generated; default: on a terminal")
    add_shared(parser, "--quantize", "--step", "--emulate", "--json")

    parser = _verb("predict", "write a model's predictions for the rows of a file", "predict.run")
    parser.example = "predict runs/first rows.csv --out classes.csv"
    add = parser.add_argument
    add_shared(parser, "run_dir")
    add(
        "file",
        metavar="FILE",
        help="table (.csv, .jsonl, .parquet), folder of images, or text file (.txt)",
    )
    add("--out", metavar="FILE", help="output file (.csv or .jsonl); default: CSV on standard output")
    add("--batch", type=count, metavar="N", help="largest batch size; default: 64")
    add("--probabilities", action="store_true", help="add the probability of each class")
    add_shared(parser, "--quantize", "--step", "--emulate")
    add("--json", action="store_true", help="print one JSON object per row instead of CSV")

    parser = _verb("serve", "serve a run or a published model over an OpenAI-compatible HTTP API", "sample.serve")
    parser.example = "serve runs/first --port 8000"
    add = parser.add_argument
    add("path", metavar="RUN|FOLDER", help="run directory, published model folder, GGUF file or adapter folder")
    add_shared(parser, "overrides")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address; default: 127.0.0.1 (this machine only)")
    add("--port", type=port_number, default=8000, metavar="N", help="port, 0 for a free one; default: 8000")
    add("--api-key-file", metavar="FILE", help="file with the API key of clients; default: $JAXTRAIN_API_KEY")
    add("--name", metavar="NAME", help="model name that clients ask for; default: the folder's name")
    add("--slots", type=count, default=8, metavar="N", help="answers generated at a time; default: 8")
    add("--length", type=count, metavar="N", help="maximum tokens of prompt and answer; default: up to 4096")
    add("--queue", type=count, default=256, metavar="N", help="maximum number of waiting answers; default: 256")
    add("--adapter", metavar="DIR", help="PEFT adapter to apply to a published model")
    add_shared(parser, "--quantize", "--step", "--emulate")


def _pages() -> None:
    parser = _verb("import", "make a run from a published model", "published.run_import")
    parser.example = "import models/SmolLM2-135M -o runs/smollm2"
    add = parser.add_argument
    add(
        "path",
        metavar="FOLDER",
        help="published model folder (config.json, safetensors), .gguf file or PEFT adapter",
    )
    add_shared(parser, "overrides")
    add("-o", "--output", required=True, metavar="RUN_DIR", help="run directory to create")
    add("--base", metavar="FOLDER", help="base model of the adapter")
    add_shared(parser, "--emulate")

    parser = _verb("export", "export a run for other tools, as safetensors or StableHLO", "published.run_export")
    parser.example = "export runs/smollm2 -o models/mine --dtype bfloat16"
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="run directory, or published model folder or .gguf file to convert")
    add("-o", "--output", required=True, metavar="FOLDER", help="folder to create")
    add(
        "--to",
        choices=("published", "stablehlo"),
        default="published",
        help="published (default): config.json and safetensors; stablehlo: a program that runs without jaxtrain",
    )
    add("--batch", type=count, metavar="N", help="rows per call of the program; default: any number if possible")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the tensors; default: that of the imported model, else float32",
    )
    add("--max-shard-size", metavar="SIZE", help="largest size of a file; default: 5GB")
    add("--merge", action="store_true", help="merge the adapters into the base and write the whole model")
    add_shared(parser, "--step", "--emulate")

    parser = _verb("report", "redraw a run's report, or compare several runs or a sweep", "runs.report")
    parser.example = "report runs/first runs/second --output compare.html"
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="run directories, or a sweep directory")
    parser.add_argument("-o", "--output", metavar="FILE", help="page to write; default: report.html or compare.html")


def _many() -> None:
    parser = _verb("sweep", "train a config with several values of its keys, and compare the trials", "sweep.sweep")
    parser.example = "sweep quickstart optimizer.learning_rate=1e-4,1e-3 train.steps=100 --run-dir runs/rates"
    add = parser.add_argument
    add("config", metavar="CONFIG", help="shipped name (quickstart, ...) or YAML file")
    add("overrides", metavar="key=value", nargs="+", help="a value for all trials, or v1,v2: every combination")
    add("--run-dir", metavar="DIR", help="sweep directory; default: runs/<name>-sweep")
    add("--jobs", type=process_count, default=1, metavar="N", help="trials to run at a time; default: 1")

    parser = _verb("launch", "run a command in several processes on this machine, as a cluster does", "launch.launch")
    parser.example = "launch --processes 2 --emulate 4 -- train quickstart train.steps=20"
    add = parser.add_argument
    parser.usage = (
        "jaxtrain launch --processes N [--emulate M] [--restarts R] -- COMMAND\n\n"
        "COMMAND: train CONFIG ..., python my.py ..."
    )
    add("--processes", type=process_count, required=True, metavar="N", help="number of processes to start")
    add("--emulate", type=process_count, metavar="M", help="emulate M CPU devices in each process")
    _restarts(parser, "R")

    parser = _verb(
        "submit slurm",
        "write a Slurm batch script that trains a config, or submit it",
        "submit.submit_slurm",
        options="submit.slurm_arguments",
    )
    parser.example = "submit slurm llama3_8b train.accumulation_steps=2 --nodes 4 --gpus-per-node 8 --time 2-0"

    parser = _verb(
        "submit job", "write a Kubernetes Job for training", "submit.submit_job", options="submit.kubernetes_arguments"
    )
    parser.example = "submit job quickstart --image example.com/jaxtrain:0.1.0 --hosts 2 --gpus 4 --volume runs:/runs"

    parser = _verb(
        "submit jobset",
        "write a Kubernetes JobSet, which restarts all hosts of a run together",
        "submit.submit_jobset",
        options="submit.kubernetes_arguments",
    )
    parser.example = "submit jobset quickstart --image example.com/jaxtrain:0.1.0 --tpu v5e/2x4 --volume runs:/runs"


def _planning() -> None:
    parser = _verb("plan", "estimate a config's memory, time and cost on hardware that you need not have", "plan.run")
    parser.example = "plan llama3_8b --on h100x8,v5p-8"
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="shipped name (llama3_8b, ...) or YAML file")
    add_shared(parser, "overrides")
    add("--on", default="cpu", metavar="HARDWARE", help="such as h100x8,v5e-16,rtx4090; default: this machine's CPU")
    add("--list", action="store_true", help="list the hardware with its figures")
    add("--hardware", metavar="FILE", help="YAML file whose hardware or prices replace the shipped ones")
    compiling = parser.add_mutually_exclusive_group().add_argument
    compiling("--analytic", action="store_true", help="use formulas only, even if the compiler is installed")
    compiling("--exact", action="store_true", help="fail if no compiler can check the figures")
    add("--search", action="store_true", help="try every layout, and rank those that fit by step time")
    add("--largest-batch", action="store_true", help="find the largest global batch that fits")
    add("--tokens", type=tokens, metavar="N", help="print the cost of training on N tokens, as in 15T or 1.5B")
    add("--config", dest="config_out", metavar="FILE", help="write the best plan's config to FILE")
    add_shared(parser, "--json")

    parser = _verb(
        "bench", "measure this machine, and how much of its speed a config's training step reaches", "bench.run_bench"
    )
    parser.example = "bench bench_cpu --json bench.json"
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", default="bench_cpu", help="shipped name or file; default: bench_cpu")
    add_shared(parser, "overrides")
    add("--json", metavar="FILE", help="write all measurements to FILE")
    add("--skip", action="append", default=[], metavar="PART", help="leave out some of start,limits,step")
    add(
        "--seconds", type=float, default=10.0, metavar="S", help="time steps for S seconds, three at least; default: 10"
    )
    add_shared(parser, "--emulate")


def _look() -> None:
    parser = _verb("config", "list the shipped configs, or show every key of one", "config.run")
    parser.example = "config quickstart train.steps=100 --only train"
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="shipped name, YAML file or run directory; default: list all"
    )
    add_shared(parser, "overrides")
    form = parser.add_mutually_exclusive_group().add_argument
    form("--only", metavar="PREFIX", help="print only the keys below PREFIX, as in optimizer")
    form("--yaml", action="store_true", help="print the resolved config as YAML")
    form("--json-schema", action="store_true", help="print the JSON schema of a config, for editors")
    form("--sharding", action="store_true", help="print how each parameter is sharded over the mesh")
    add_shared(parser, "--emulate")

    parser = _verb("doctor", "check versions, devices, caches and speed, and say how to fix each problem", "doctor.run")
    parser.example = "doctor --emulate 8"
    add_shared(parser, "--emulate", "--json")

    parser = _verb("data prepare", "tokenize the text of a config into token shards", "data.run_prepare")
    parser.example = "data prepare quickstart -o tokens"
    add_shared(parser, "config", "overrides")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for the token shards")

    parser = _verb("data show", "show rows as the model sees them, and which tokens have a loss", "data.run_show")
    parser.example = "data show quickstart data.kind=chat --rows 1"
    add_shared(parser, "config", "overrides")
    parser.add_argument("--rows", type=count, default=2, metavar="N", help="number of rows; default: 2")
    add_shared(parser, "--json")

    parser = _verb("ckpt ls", "list the checkpoints of a run", "runs.run_ls")
    parser.example = "ckpt ls runs/first --verify"
    add_shared(parser, "run_dir")
    parser.add_argument("--verify", action="store_true", help="read every array and compare it with its digest")
    add_shared(parser, "--json")

    parser = _verb("ckpt show", "show what a checkpoint holds", "runs.run_show")
    parser.example = "ckpt show runs/first --step 100"
    add_shared(parser, "run_dir", "--step", "--json")


for _add in (_training, _use, _pages, _many, _planning, _look):
    _add()
