"""The verbs of the command line: a line of help, an example, the options, and the function that does the work.

The work is imported when it is asked for, so that `--help` answers at once. No jax here.
"""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtrain.commands.arguments import add_shared, count, process_count, step_number, tokens, whole


@dataclass(frozen=True)
class Command:
    """One verb: its line in the help, an example, its options and the function that runs it.

    With `takes_command`, the words after `--` are another command: they are checked and given as `arguments.command`;
    `arguments.inner` has the arguments of a verb of jaxtrain, and is None for another program.
    """

    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    takes_command: bool = False


def _later(target: str) -> Callable[[Any], Any]:
    """The function `module.function` of `jaxtrain.commands`, imported when it is called."""
    module, _, name = target.partition(".")

    def call(given: Any) -> Any:
        return getattr(importlib.import_module(f"jaxtrain.commands.{module}"), name)(given)

    return call


def _train(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "config", "overrides")
    parser.add_argument("--run-dir", metavar="DIR", help="directory of the run; default: runs/<name>, or that run")
    parser.add_argument(
        "--resume",
        default="auto",
        choices=("auto", "must", "never"),
        help="resume from the newest checkpoint where there is one (auto, the default), always (must), or never",
    )
    _restarts(parser, "N")
    add_shared(parser, "--emulate")


def _restarts(parser: argparse.ArgumentParser, metavar: str) -> None:
    told = f"start again after a failure, at most {metavar} times, from the newest intact checkpoint; default: 0"
    parser.add_argument("--restarts", type=step_number, default=0, metavar=metavar, help=told)


def _launch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = (
        "jaxtrain launch --processes N [--emulate M] [--restarts R] -- COMMAND\n\n"
        "COMMAND: train CONFIG ..., python my.py ..."
    )
    add("--processes", type=process_count, required=True, metavar="N", help="how many processes to start")
    add("--emulate", type=process_count, metavar="M", help="emulate M CPU devices in each process")
    _restarts(parser, "R")
    add(
        "--min-processes",
        type=process_count,
        metavar="K",
        help="where a run fails twice in a row at one step, restart with a process less, down to K; default: all",
    )


def _eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="directory of a run; with --tasks also a published folder or GGUF file")
    add_shared(parser, "overrides")
    add(
        "--tasks",
        metavar="FILE|NAME",
        help="tasks of lm-eval-harness in place of held-out rows, as task.yaml or arc_easy,hellaswag (extra: harness)",
    )
    add("--limit", type=count, metavar="N", help="with --tasks: documents of each task; default: all")
    add("--shots", type=step_number, metavar="N", help="with --tasks: examples before a question; default: the task's")
    add("--chat", action="store_true", help="with --tasks: ask by the chat template of the run")
    add("--batch", type=count, metavar="N", help="with --tasks: rows of a batch; default: by length")
    add_shared(parser, "--quantize", "--step", "--emulate", "--json")


def _sample(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN|FOLDER", help="a run, a published folder or GGUF file, or an adapter")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated; default: stdin"
    )
    prompts.add_argument("--chat", action="append", metavar="QUESTION", help="question to answer; may be repeated")
    add("-n", "--tokens", type=count, metavar="N", help="new tokens; default: 200, or as many as fit")
    add("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy; default: 0.8")
    add("--top-k", type=count, metavar="K", help="only the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="only the most likely tokens that add up to P")
    add("--min-p", type=float, metavar="P", help="only tokens of at least P times the best one")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="weaken tokens of the text; default: 1, not")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; give it several times")
    add("--seed", type=step_number, default=0, metavar="N", help="seed of random choices; default: 0")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--beams", type=count, metavar="N", help="search the most likely text among N beginnings")
    form.add_argument(
        "--stream", action="store_true", help="print text as it is written; default: where it goes to a terminal"
    )
    add(
        "--logprobs",
        type=lambda text: whole(text, 0, 20),
        nargs="?",
        const=0,
        metavar="K",
        help="log-probability of each new token, and of the K likeliest ones in its place",
    )
    add("--special-tokens", action="store_true", help="show the special tokens that the model writes")
    add_shared(parser, "--quantize", "--step", "--emulate", "--json")


def _predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_shared(parser, "run_dir")
    add(
        "file",
        metavar="FILE",
        help="table (.csv, .jsonl, .parquet), folder or list of images, texts (.txt), or array (.npy)",
    )
    add("--out", metavar="FILE", help="write FILE (.csv or .jsonl); default: CSV on standard output")
    add("--batch", type=count, metavar="N", help="the largest batch; default: a microbatch of the run")
    add("--probabilities", action="store_true", help="add the probability of each class")
    add_shared(parser, "--quantize", "--step", "--emulate")
    add("--json", action="store_true", help="print one JSON object per row instead of CSV")


def _serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN|FOLDER", help="a run, a published folder or GGUF file, or an adapter")
    add_shared(parser, "overrides")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="default: this machine only, 127.0.0.1")
    add("--port", type=step_number, default=8000, metavar="N", help="0: a free one; default: 8000")
    add("--api-key-file", metavar="FILE", help="the key that clients give; default: JAXTRAIN_API_KEY (environment)")
    add("--name", metavar="NAME", help="what clients call the model; default: the name of the folder")
    add("--slots", type=count, default=8, metavar="N", help="answers that run at a time; default: 8")
    add("--length", type=count, metavar="N", help="tokens of prompt and answer; default: up to 4096")
    add("--queue", type=count, default=256, metavar="N", help="answers that may wait; default: 256")
    add("--adapter", metavar="DIR", help="an adapter of PEFT over a published folder")
    add_shared(parser, "--quantize", "--step", "--emulate")


def _import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "path",
        metavar="FOLDER",
        help="published folder (config.json, safetensors), a .gguf file, or an adapter of PEFT",
    )
    add_shared(parser, "overrides")
    add("-o", "--output", metavar="RUN_DIR", help="directory of the run to make; --check needs none")
    add("--base", metavar="FOLDER", help="published model that an adapter is of")
    add_shared(parser, "--check", "--emulate")


def _export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="directory of a run, or a published folder or .gguf file to write again")
    add("-o", "--output", required=True, metavar="FOLDER", help="folder to make")
    add(
        "--to",
        choices=("published", "stablehlo"),
        default="published",
        help="config.json and safetensors (published, the default), or a program that runs without jaxtrain",
    )
    add("--batch", type=count, metavar="N", help="rows per call of a program; default: any number where it can be")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the tensors; default: that of the model that the run started from, else float32",
    )
    add("--max-shard-size", metavar="SIZE", help="most bytes per file; default: 5GB")
    add("--merge", action="store_true", help="of a run with adapters: add them to the base and write all of the model")
    add(
        "--base",
        choices=("nf4",),
        help="write linear layers in 4 bits as bitsandbytes does, which transformers and model.from read",
    )
    add_shared(parser, "--step", "--check", "--emulate")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="directories of runs, or the folder of a sweep")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page; default: report.html of a run, compare.html")


def _plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="a shipped name (llama3_8b, ...) or a YAML file")
    add_shared(parser, "overrides")
    add("--on", default="cpu", metavar="HARDWARE", help="as in h100x8,v5e-16,rtx4090; default: this machine's CPU")
    add("--list", action="store_true", help="list the hardware with its figures")
    add("--hardware", metavar="FILE", help="YAML with hardware or prices that replace the shipped ones")
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument(
        "--analytic", action="store_true", help="do not compile, even where the compiler is installed"
    )
    compiling.add_argument("--exact", action="store_true", help="fail where no compiler can check the figures")
    add("--search", action="store_true", help="try every layout, and rank by time those that fit")
    add(
        "--vary",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="WHAT",
        help="what a search varies: mesh,zero,remat,microbatches,schedule (the default), precision, optimizer, base, "
        "rank, batch",
    )
    add("--largest-batch", action="store_true", help="find the largest global batch that fits")
    add("--tokens", type=tokens, metavar="N", help="print the cost of N tokens, as in 15T or 1.5B")
    add("--epochs", type=float, metavar="N", help="print the cost of N epochs, with --rows-per-epoch")
    add("--rows-per-epoch", type=count, metavar="N", help="number of rows of the data")
    add("--checkpoint-minutes", type=float, metavar="N", help="time between saves on spot devices")
    add("--interruptions-per-day", type=float, metavar="N", help="per spot node; default: 1")
    add("--downtime", type=float, metavar="SHARE", help="of the time to train, as in 0.1 for 10 %%")
    add("--network", metavar="RATE", help="of one device between nodes or slices: 400Gb (bits/s) or 50GB (bytes/s)")
    add("--full", action="store_true", help="print the whole table: time by block and link, energy")
    add("--html", metavar="FILE", help="write a page with pictures to FILE")
    add("--config", dest="config_out", metavar="FILE", help="write the config of the best plan to FILE")
    add_shared(parser, "--json")


def _bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", default="bench_cpu", help="a shipped name or a file; default: bench_cpu")
    add_shared(parser, "overrides")
    add("--json", metavar="FILE", help="write everything that was measured to FILE")
    add("--out", metavar="DIR", help="write bench.json and a picture, bench.svg, to DIR")
    add("--skip", action="append", default=[], metavar="PART", help="leave out some of start,limits,blocks,step,cpu")
    add_shared(parser, "--emulate")


def _run_bench(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.bench import run_bench

    return run_bench(
        arguments.config,
        arguments.overrides,
        json_path=arguments.json,
        out=arguments.out,
        skip=arguments.skip,
        emulate=arguments.emulate,
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a shipped name, a file or a run; default: list the shipped ones"
    )
    add_shared(parser, "overrides")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--only", metavar="PREFIX", help="print only the keys below PREFIX, as in optimizer")
    form.add_argument("--yaml", action="store_true", help="print the resolved config as YAML")
    form.add_argument("--json-schema", action="store_true", help="print the JSON schema of a config, for editors")
    form.add_argument("--sharding", action="store_true", help="print how each parameter is sharded over the mesh")
    add_shared(parser, "--emulate")


def _data_prepare(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "config", "overrides")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for the files of tokens")
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="processes that encode; default: the cores, where there is enough text",
    )


def _data_show(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "config", "overrides")
    parser.add_argument("--rows", type=count, default=2, metavar="N", help="how many rows; default: 2")
    add_shared(parser, "--json")


def _ckpt_ls(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "run_dir")
    parser.add_argument("--verify", action="store_true", help="read every array and compare it with its digest")
    add_shared(parser, "--json")


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train what a config describes, or resume the run",
        "jaxtrain train quickstart train.steps=100 --run-dir runs/first",
        _train,
        _later("train.run"),
    ),
    "eval": Command(
        "evaluate a checkpoint of a run on held-out rows",
        "jaxtrain eval runs/first evaluation.max_batches=null",
        _eval,
        _later("eval.run"),
    ),
    "sample": Command(
        "continue text with a checkpoint of a run",
        "jaxtrain sample runs/first -p 'The class statement' -n 100",
        _sample,
        _later("sample.run"),
    ),
    "predict": Command(
        "give the classes, numbers or embeddings of the rows of a file",
        "jaxtrain predict runs/first rows.csv --out classes.csv",
        _predict,
        _later("predict.run"),
    ),
    "serve": Command(
        "answer the clients of OpenAI's interface over HTTP with a run or a published model",
        "jaxtrain serve runs/first --port 8000",
        _serve,
        _later("serve.run"),
    ),
    "import": Command(
        "make a run of a published model",
        "jaxtrain import models/SmolLM2-135M -o runs/smollm2",
        _import,
        _later("published.run_import"),
    ),
    "export": Command(
        "write a checkpoint of a run as a published folder, which other tools open",
        "jaxtrain export runs/smollm2 -o models/mine --dtype bfloat16",
        _export,
        _later("published.run_export"),
    ),
    "report": Command(
        "draw the page of a run again, or one page about several runs or a sweep",
        "jaxtrain report runs/first runs/second --output compare.html",
        _report,
        _later("report.run"),
    ),
    "sweep": Command(
        "train a config with several values of its settings, and compare the trials",
        "jaxtrain sweep quickstart optimizer.learning_rate=1e-4,1e-3 train.steps=100 --run-dir runs/rates",
        _later("sweep_arguments.sweep_arguments"),
        _later("sweep_arguments.sweep"),
    ),
    "launch": Command(
        "run a command or program in several processes on this machine, as a cluster would",
        "jaxtrain launch --processes 2 --emulate 4 -- train quickstart train.steps=20",
        _launch,
        _later("train.launch"),
        takes_command=True,
    ),
    "submit slurm": Command(
        "write the batch script with which Slurm trains a config, or submit it",
        "jaxtrain submit slurm llama3_8b train.accumulation_steps=2 --nodes 4 --gpus-per-node 8 --time 2-0",
        _later("submit.slurm_arguments"),
        _later("submit.submit_slurm"),
    ),
    "submit job": Command(
        "write a training as a Kubernetes Job",
        "jaxtrain submit job quickstart --image example.com/jaxtrain:0.1.0 --hosts 2 --gpus 4 --volume runs:/runs",
        _later("submit_kubernetes.kubernetes_arguments"),
        _later("submit_kubernetes.submit_job"),
    ),
    "submit jobset": Command(
        "write a training as a JobSet of Kubernetes, whose hosts start again together",
        "jaxtrain submit jobset quickstart --image example.com/jaxtrain:0.1.0 --tpu v5e/2x4 --volume runs:/runs",
        _later("submit_kubernetes.kubernetes_arguments"),
        _later("submit_kubernetes.submit_jobset"),
    ),
    "plan": Command(
        "estimate memory, time and cost on hardware that you do not need to have",
        "jaxtrain plan llama3_8b --on h100x8,v5p-8",
        _plan,
        _later("plan.run"),
    ),
    "bench": Command(
        "measure this machine, and how much of its speed the step of a config reaches",
        "jaxtrain bench bench_cpu --out runs/bench",
        _bench,
        _run_bench,
    ),
    "config": Command(
        "list the shipped configs, or every key of one",
        "jaxtrain config quickstart train.steps=100 --only train",
        _config,
        _later("config.run"),
    ),
    "doctor": Command(
        "check versions, devices, caches and speed, and say how to fix each problem",
        "jaxtrain doctor --emulate 8",
        lambda parser: add_shared(parser, "--emulate", "--json"),
        _later("doctor.run"),
    ),
    "data prepare": Command(
        "encode the text of a config into token shards",
        "jaxtrain data prepare quickstart -o tokens",
        _data_prepare,
        _later("data.run_prepare"),
    ),
    "data show": Command(
        "show rows as the model sees them, and which tokens have a loss",
        "jaxtrain data show quickstart data.kind=chat --rows 1",
        _data_show,
        _later("data.run_show"),
    ),
    "ckpt ls": Command(
        "list the checkpoints of a run",
        "jaxtrain ckpt ls runs/first --verify",
        _ckpt_ls,
        _later("ckpt.run_ls"),
    ),
    "ckpt show": Command(
        "show what a checkpoint holds",
        "jaxtrain ckpt show runs/first --step 100",
        lambda parser: add_shared(parser, "run_dir", "--step", "--json"),
        _later("ckpt.run_show"),
    ),
}
