"""The commands as one table: arguments, an example, and the function that imports and runs each command."""

import argparse
import dataclasses

from jaxtrain.commands.command import Command, count, number, tokens
from jaxtrain.commands.data_arguments import prepare, prepare_arguments, show, show_arguments
from jaxtrain.commands.published_arguments import (
    export_arguments,
    export_published,
    import_arguments,
    import_published,
)
from jaxtrain.commands.shared_arguments import (
    add_emulate,
    add_json,
    add_overrides,
    add_run,
    add_step,
)
from jaxtrain.commands.train_arguments import launch, launch_arguments, train, train_arguments


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.eval_arguments import eval_arguments

    eval_arguments(parser)


def _eval(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.eval_arguments import evaluate

    return evaluate(arguments)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.sample_arguments import sample_arguments

    sample_arguments(parser)


def _sample(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.sample_arguments import sample

    return sample(arguments)


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.predict_arguments import predict_arguments

    predict_arguments(parser)


def _predict(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.predict_arguments import predict

    return predict(arguments)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.serve_arguments import serve_arguments

    serve_arguments(parser)


def _serve(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.serve_arguments import serve

    return serve(arguments)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a shipped name, a file or a run; default: list the shipped ones"
    )
    add_overrides(parser)
    parser.add_argument("--only", metavar="PREFIX", help="print only the keys below PREFIX, as in optimizer")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="print the resolved config as YAML")
    form.add_argument("--json-schema", action="store_true", help="print the JSON schema of a config, for editors")
    form.add_argument("--sharding", action="store_true", help="print how each parameter is sharded over the mesh")
    add_emulate(parser)


def _config(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.config import print_config

    forms = {"yaml": arguments.yaml, "json-schema": arguments.json_schema, "sharding": arguments.sharding}
    return print_config(
        arguments.config,
        arguments.overrides,
        form=next((form for form, asked in forms.items() if asked), "keys"),
        only=arguments.only,
        emulate=arguments.emulate,
    )


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_emulate(parser)
    add_json(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.doctor import run_doctor

    return run_doctor(emulate=arguments.emulate, as_json=arguments.json)


def _ckpt_ls_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--verify", action="store_true", help="read every array and compare it with its digest")
    add_json(parser)


def _ckpt_ls(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.ckpt import run_ckpt_ls

    return run_ckpt_ls(arguments.run_dir, verify=arguments.verify, as_json=arguments.json)


def _ckpt_show_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_step(parser)
    add_json(parser)


def _ckpt_show(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.ckpt import run_ckpt_show

    return run_ckpt_show(arguments.run_dir, step=arguments.step, as_json=arguments.json)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", default="bench_cpu", help="a shipped name or a file; default: bench_cpu"
    )
    add_overrides(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured to FILE")
    parser.add_argument("--out", metavar="DIR", help="write bench.json and a picture, bench.svg, to DIR")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PART", help="leave out some of start,limits,blocks,step"
    )
    add_emulate(parser)


def _bench(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.bench import run_bench

    return run_bench(arguments)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a shipped name (llama3_8b, ...) or a YAML file")
    add_overrides(parser)
    parser.add_argument("--on", metavar="HARDWARE", help="as in h100x8,v5e-16,rtx4090; default: this machine's CPU")
    parser.add_argument("--list", action="store_true", help="list the hardware with its figures")
    parser.add_argument(
        "--hardware",
        dest="hardware_file",
        metavar="FILE",
        help="YAML with hardware or prices that replace the shipped ones",
    )
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument(
        "--analytic", action="store_true", help="do not compile, even where the compiler is installed"
    )
    compiling.add_argument("--exact", action="store_true", help="fail where no compiler can check the figures")
    parser.add_argument("--search", action="store_true", help="try every layout, and rank by time those that fit")
    parser.add_argument(
        "--vary",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="WHAT",
        help="what a search varies: mesh,zero,remat,microbatches,schedule (the default), precision, optimizer, base, "
        "rank, batch",
    )
    parser.add_argument("--top", type=count, default=3, metavar="N", help="layouts of a search to show; default: 3")
    parser.add_argument("--largest-batch", action="store_true", help="find the largest global batch that fits")
    parser.add_argument("--tokens", type=tokens, metavar="N", help="print the cost of N tokens, as in 15T or 1.5B")
    parser.add_argument("--epochs", type=number, metavar="N", help="print the cost of N epochs, with --rows-per-epoch")
    parser.add_argument("--rows-per-epoch", type=count, metavar="N", help="number of rows of the data")
    parser.add_argument(
        "--usd-per-kwh", type=number, default=0.12, metavar="USD", help="price of electricity; default: 0.12"
    )
    parser.add_argument("--checkpoint-minutes", type=number, metavar="N", help="time between saves on spot devices")
    parser.add_argument("--interruptions-per-day", type=number, metavar="N", help="per spot node; default: 1")
    parser.add_argument("--downtime", type=number, metavar="SHARE", help="of the time to train, as in 0.1 for 10 %%")
    parser.add_argument(
        "--network", metavar="RATE", help="of one device between nodes or slices: 400Gb (bits/s) or 50GB (bytes/s)"
    )
    parser.add_argument("--full", action="store_true", help="print the whole table: time by block and link, energy")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures to FILE")
    parser.add_argument("--config", dest="config_out", metavar="FILE", help="write the config of the best plan to FILE")
    add_json(parser)


def _plan(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.plan import Wanted, run_plan

    wanted = Wanted(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Wanted)})
    return run_plan(arguments.config, arguments.overrides, wanted, list_hardware=arguments.list)


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.sweep import sweep_arguments

    sweep_arguments(parser)


def _sweep(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.sweep import sweep

    return sweep(arguments)


def _submit_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.submit import slurm_arguments

    slurm_arguments(parser)


def _submit_slurm(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.submit import submit_slurm

    return submit_slurm(arguments)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="directories of runs, or the folder of a sweep")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page; default: report.html of a run, compare.html")


def _report(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.report import run_report

    return run_report(arguments.run_dirs, output=arguments.output)


def _kubernetes_arguments(parser: argparse.ArgumentParser) -> None:
    from jaxtrain.commands.submit import kubernetes_arguments

    kubernetes_arguments(parser)


def _submit_job(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.submit import submit_job

    return submit_job(arguments)


def _submit_jobset(arguments: argparse.Namespace) -> int:
    from jaxtrain.commands.submit import submit_jobset

    return submit_jobset(arguments)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train what a config describes, or resume the run",
        "jaxtrain train quickstart train.steps=100 --run-dir runs/first",
        train_arguments,
        train,
    ),
    "eval": Command(
        "evaluate a checkpoint of a run on held-out rows",
        "jaxtrain eval runs/first evaluation.max_batches=null",
        _eval_arguments,
        _eval,
    ),
    "sample": Command(
        "continue text with a checkpoint of a run",
        "jaxtrain sample runs/first -p 'The class statement' -n 100",
        _sample_arguments,
        _sample,
    ),
    "predict": Command(
        "give the classes, numbers or embeddings of the rows of a file",
        "jaxtrain predict runs/first rows.csv --out classes.csv",
        _predict_arguments,
        _predict,
    ),
    "serve": Command(
        "answer the clients of OpenAI's interface over HTTP with a run or a published model",
        "jaxtrain serve runs/first --port 8000",
        _serve_arguments,
        _serve,
    ),
    "import": Command(
        "make a run of a published model",
        "jaxtrain import models/SmolLM2-135M -o runs/smollm2",
        import_arguments,
        import_published,
    ),
    "export": Command(
        "write a checkpoint of a run as a published folder, which other tools open",
        "jaxtrain export runs/smollm2 -o models/mine --dtype bfloat16",
        export_arguments,
        export_published,
    ),
    "report": Command(
        "draw the page of a run again, or one page about several runs or a sweep",
        "jaxtrain report runs/first runs/second --output compare.html",
        _report_arguments,
        _report,
    ),
    "sweep": Command(
        "train a config with several values of its settings, and compare the trials",
        "jaxtrain sweep quickstart optimizer.learning_rate=1e-4,1e-3 train.steps=100 --run-dir runs/rates",
        _sweep_arguments,
        _sweep,
    ),
    "launch": Command(
        "run a command or program in several processes on this machine, as a cluster would",
        "jaxtrain launch --processes 2 --emulate 4 -- train quickstart train.steps=20",
        launch_arguments,
        launch,
        takes_command=True,
    ),
    "submit slurm": Command(
        "write the batch script with which Slurm trains a config, or submit it",
        "jaxtrain submit slurm llama3_8b train.accumulation_steps=2 --nodes 4 --gpus-per-node 8 --time 2-0",
        _submit_slurm_arguments,
        _submit_slurm,
    ),
    "submit job": Command(
        "write a training as a Kubernetes Job",
        "jaxtrain submit job quickstart --image example.com/jaxtrain:0.1.0 --hosts 2 --gpus 4 --volume runs:/runs",
        _kubernetes_arguments,
        _submit_job,
    ),
    "submit jobset": Command(
        "write a training as a JobSet of Kubernetes, whose hosts start again together",
        "jaxtrain submit jobset quickstart --image example.com/jaxtrain:0.1.0 --tpu v5e/2x4 --volume runs:/runs",
        _kubernetes_arguments,
        _submit_jobset,
    ),
    "plan": Command(
        "estimate memory, time and cost on hardware that you do not need to have",
        "jaxtrain plan llama3_8b --on h100x8,v5p-8",
        _plan_arguments,
        _plan,
    ),
    "bench": Command(
        "measure this machine, and how much of its speed the step of a config reaches",
        "jaxtrain bench bench_cpu --out runs/bench",
        _bench_arguments,
        _bench,
    ),
    "config": Command(
        "list the shipped configs, or every key of one",
        "jaxtrain config quickstart train.steps=100 --only train",
        _config_arguments,
        _config,
    ),
    "doctor": Command(
        "check versions, devices, caches and speed, and say how to fix each problem",
        "jaxtrain doctor --emulate 8",
        _doctor_arguments,
        _doctor,
    ),
    "data prepare": Command(
        "encode the text of a config into token shards",
        "jaxtrain data prepare quickstart -o tokens",
        prepare_arguments,
        prepare,
    ),
    "data show": Command(
        "show rows as the model sees them, and which tokens have a loss",
        "jaxtrain data show quickstart data.kind=chat --rows 1",
        show_arguments,
        show,
    ),
    "ckpt ls": Command(
        "list the checkpoints of a run",
        "jaxtrain ckpt ls runs/first --verify",
        _ckpt_ls_arguments,
        _ckpt_ls,
    ),
    "ckpt show": Command(
        "show what a checkpoint holds",
        "jaxtrain ckpt show runs/first --step 100",
        _ckpt_show_arguments,
        _ckpt_show,
    ),
}
