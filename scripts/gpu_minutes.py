"""The first minutes on an accelerator: everything worth knowing of a card, in nine minutes at most and without network.

    python3 scripts/gpu_minutes.py [--out DIR] [--only llama,plan]
    python3 scripts/gpu_minutes.py --out DIR --rehearse          (tiny sizes on this CPU)

Each part is a process with a time limit, which grows by what the parts before it left of theirs; a part that fails or
hangs costs only itself. Its figures are in DIR (default: $OUT) as soon as they are there: in PART.json while it runs,
then in results.json and table.md, and its output is in log.txt: no more files than a borrowed machine may return.
CONTRIBUTING.md has the commands.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import operator
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jaxtrain as jt  # noqa: E402  (the checkout's, not an installed one)
from jaxtrain.metrics.runinfo import package_versions  # noqa: E402
from jaxtrain.plan.estimate import analyse  # noqa: E402
from jaxtrain.plan.hardware import Hardware, hardware_of  # noqa: E402
from jaxtrain.plan.targets import Target, measure_cpu  # noqa: E402
from jaxtrain.plan.workload import describe_workload  # noqa: E402

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pydantic", "torch", "triton")
Figure = dict[str, Any]  # name, value (None: it could not be measured), unit, goal, whether it is met, and a note
Goal = tuple[str, float]
_MEETS: dict[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "within": lambda value, share: abs(value - 1) <= share,
}


def figure(name: str, value: float | None, unit: str = "", goal: Goal | None = None, note: str = "") -> Figure:
    """A measurement; the goal is a rule of `_MEETS` and its bound."""
    met = None if goal is None or value is None else _MEETS[goal[0]](value, goal[1])
    text = "" if goal is None else f"{goal[0]} {goal[1]:g}"
    return {"name": name, "value": value, "unit": unit, "goal": text, "met": met, "note": note}


def last_line(text: str) -> str:
    """The last line of what a process said."""
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "no output")


def attempt(name: str, work: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """The figures of a piece of a part, which may fail without the rest."""
    try:
        yield from work()
    except Exception as error:  # whatever it is, it is reported
        yield figure(name, None, note=last_line(f"{type(error).__name__}: {error}"))


def command(*words: str) -> str:
    """What a command of this Python prints; a RuntimeError with its last line where it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))
    return done.stdout


_SMALL_RESNET = ("model.stage_blocks=[1]", "model.width=8", "data.image_size=32")
_SMALL = (
    *("model.num_layers=1", "model.embed_dim=32", "model.num_heads=2", "model.num_kv_heads=2", "model.mlp_dim=64"),
    *("model.vocab_size=256", "model.max_sequence_length=32"),
)


@dataclass
class Minutes:
    """What the parts share.

    Attributes:
        out: folder of the results.
        rehearse: whether sizes are tiny.
        benches: words of a config -> what `jaxtrain bench` answered, of earlier parts too.
    """

    out: Path
    rehearse: bool
    benches: dict[str, Any] = field(default_factory=dict)

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """A config and its settings; in a rehearsal with tiny sizes."""
        length = ("data.sequence_length=32",) if "llama" in words[0] else ()
        small = (*(_SMALL_RESNET if "resnet" in words[0] else (*_SMALL, *length)), "train.global_batch_size=8")
        return (*words, *(small if self.rehearse else ()))

    def bench(self, words: Sequence[str]) -> dict[str, Any]:
        """What `jaxtrain bench` says, in a process of its own, so that the peak of memory is of this config alone."""
        words = self.words(words)
        if " ".join(words) not in self.benches:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                options = ("--skip", "start,limits", "--seconds", "0.1" if self.rehearse else "3", "--json", file.name)
                command("-m", "jaxtrain", "bench", *words, *options)
                self.benches[" ".join(words)] = json.loads(file.read())
        return self.benches[" ".join(words)]


# --- Whole steps, as `jaxtrain bench` and PyTorch measure them. ---

ONE = ("parallel.data=auto", "parallel.fsdp=1", "train.accumulation_steps=1")
LLAMA = (
    *("llama3_8b", "model.size=llama3.2_1b", "data.sequence_length=4096", "model.max_sequence_length=4096"),
    *(*ONE, "train.global_batch_size=8"),
)
BF16, FP8, FULL = ("Llama 1.2B bf16, remat dots", "Llama 1.2B fp8, remat dots", "Llama 1.2B bf16, remat full")
RESNET = "ResNet-50 bf16"
CONFIGS = {
    BF16: (*LLAMA, "remat.policy=dots"),
    FP8: (*LLAMA, "remat.policy=dots", "precision.policy=fp8"),
    FULL: (*LLAMA, "remat.policy=full"),
    RESNET: ("resnet50_imagenet", *ONE, "train.global_batch_size=256"),
    "GPT-2 124M bf16": ("gpt2_124m", *ONE, "train.global_batch_size=32"),
}


def speed(minutes: Minutes, name: str, *, mfu: Goal | None = None, over: str | None = None) -> Iterator[Figure]:
    """Speed, MFU and peak memory of a config, and its speed over that of another one in bf16."""
    answer = minutes.bench(CONFIGS[name])
    step, why = answer["step"], answer["reasons"]
    note = f"{step['seconds'] * 1e3:.4g} ms; {'; '.join(choice.partition(', not ')[0] for choice in answer['choices'])}"
    yield figure(name, step["units_per_second"], f"{step['unit']}/s", note=note)
    note = why.get("step.model_flops_utilization", "")
    yield figure(f"{name}: MFU", step["model_flops_utilization"], goal=mfu, note=note)
    peak = step["device_peak_bytes"]
    yield figure(f"{name}: peak", peak and peak / 2**30, "GiB", note=why.get("step.device_peak_bytes", ""))
    if over is not None:
        rate = minutes.bench(CONFIGS[over])["step"]["units_per_second"]
        yield figure(f"{name} over bf16", step["units_per_second"] / rate, "x", ("at least", 1.3))


def beside_torch(minutes: Minutes, name: str, work: str, rows: int, goal: float) -> Iterator[Figure]:
    """The speed of PyTorch in the same work, and ours over it."""
    options = ("--rows", str(rows), "--seconds", "3") if not minutes.rehearse else ("--rehearse", "--seconds", "0.1")
    said = command(str(ROOT / "scripts" / "peers" / "torch_gpu.py"), work, *options)
    answer = json.loads(said.splitlines()[-1])
    note = f"{answer['rows']} rows, peak {(answer['peak_memory_bytes'] or 0) / 2**30:.1f} GiB, {answer['versions']}"
    yield figure(f"torch.compile, {work}", answer["units_per_second"], "units/s", note=note)
    rate = minutes.bench(CONFIGS[name])["step"]["units_per_second"]
    yield figure(f"{name} over torch.compile", rate / answer["units_per_second"], "x", ("at least", goal))


def llama(minutes: Minutes) -> Iterator[Figure]:
    yield from attempt(BF16, lambda: speed(minutes, BF16, mfu=("at least", 0.6)))
    yield from attempt("torch.compile", lambda: beside_torch(minutes, BF16, "llama", 8, 1.1))
    yield from attempt(FP8, lambda: speed(minutes, FP8, over=BF16))
    yield from attempt(FULL, lambda: speed(minutes, FULL))


def resnet(minutes: Minutes) -> Iterator[Figure]:
    yield from attempt(RESNET, lambda: speed(minutes, RESNET))
    yield from attempt("torch.compile", lambda: beside_torch(minutes, RESNET, "resnet50", 256, 1.0))


def plan(minutes: Minutes) -> Iterator[Figure]:
    """Plans beside the measured steps, and the share of the peak that explains the times of transformers in bf16."""
    efficiencies: list[float] = []
    for name in CONFIGS:
        yield from attempt(name, partial(planned, minutes, name, efficiencies))
    if efficiencies:
        yield figure("matmul_efficiency", statistics.median(efficiencies), note="of hardware.yaml, by these times")


@cache
def hardware_on(kind: str) -> Hardware | None:
    """The catalogue's row of a device; by its name, because benches need the memory that this process would take."""
    return measure_cpu(1) if kind == "cpu" else hardware_of(kind)


def planned(minutes: Minutes, name: str, efficiencies: list[float]) -> Iterator[Figure]:
    """Peak and time of a config by the planner over the measured ones; adds the efficiency."""
    answer, config = minutes.bench(CONFIGS[name]), config_of(minutes.words(CONFIGS[name]))
    hardware, step = hardware_on(answer["device"]["kind"]), answer["step"]
    assert hardware is not None, "a device that is not in the catalogue"

    def analysed(efficiency: float | None) -> Any:
        return analyse(config, Target(dataclasses.replace(hardware, matmul_efficiency=efficiency), 1, 1))

    estimate, peak = analysed(hardware.matmul_efficiency), step["device_peak_bytes"]
    note = f"{estimate.memory.total_bytes / 2**30:.4g} GiB planned"
    note += "" if peak else "; beside the compiler's figure, because this device reports none"
    over = estimate.memory.total_bytes / (peak or step["planned_bytes"])
    yield figure(f"{name}: planned peak over measured", over, "x", ("within", 0.1), note)
    note = f"{estimate.time.seconds * 1e3:.4g} ms planned"
    yield figure(f"{name}: planned time over measured", estimate.time.seconds / step["seconds"], "x", note=note)
    low, high = 0.01, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if analysed(middle).time.seconds > step["seconds"] else (low, middle)
    if config.precision.policy == "bf16" and config.model.kind == "transformer":
        efficiencies.append(low)


# --- What the process of a part does on the card itself. ---


def config_of(words: Sequence[str]) -> jt.Config:
    return jt.load_config(words[0], overrides=words[1:], weights=False).config


def difference(found: Any, truth: Any) -> float:
    """The norm of the difference over that of the truth, the largest of several arrays."""
    norms = [(jnp.linalg.norm(a.astype("float32") - b), jnp.linalg.norm(b)) for a, b in zip(found, truth, strict=True)]
    return max(float(apart / norm) for apart, norm in norms)


def with_gradients(call: Callable[..., Any], *arrays: Any) -> tuple[Any, ...]:
    """The result of a call of all arrays but the last, which is the gradient of it, and their gradients."""
    out, pull = jax.vjp(call, *arrays[:-1])
    return (out, *pull(arrays[-1]))


def random_arrays(*shapes: tuple[int, ...]) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]


def trained(words: Sequence[str], steps: int) -> tuple[list[float], float, int]:
    """Losses of steps on one batch, median seconds after the first, and bytes of the device by the compiler."""
    from jaxtrain.bench.step import workload_step

    config = config_of((*words, "optimizer.schedule.warmup_steps=0"))
    step, batches = workload_step(config, describe_workload(config))
    memory: Any = step.compile(batches.spec()).memory_analysis()
    state, batch, losses, seconds = step.init(0), step.loader(batches)(0), [], []
    for _ in range(steps):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - began)
        losses.append(float(metrics["loss"]))
    return losses, statistics.median(seconds[1:]), memory.argument_size_in_bytes + memory.temp_size_in_bytes


# Policy -> how far a loss may be from the CPU's: other orders of sums in numbers of 24, 8, 11 and 4 bits.
BOUNDS = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2, "fp8": 3e-2}


def losses(minutes: Minutes) -> dict[str, list[float]]:
    """Three losses of quickstart under each policy."""
    words = minutes.words(("quickstart",))
    return {policy: trained((*words, f"precision.policy={policy}"), 3)[0] for policy in BOUNDS}


def doctor(minutes: Minutes) -> Iterator[Figure]:
    code = f"import gpu_minutes as g, json; print(json.dumps(g.losses(g.Minutes(g.ROOT, {minutes.rehearse}))))"
    words, environment = [sys.executable, "-c", code], {**os.environ, "JAX_PLATFORMS": "cpu"}
    beside = subprocess.Popen(words, cwd=ROOT / "scripts", env=environment, stdout=subprocess.PIPE, text=True)
    yield from attempt("jaxtrain doctor", checks)
    yield from attempt("attention", partial(attention, minutes))
    own, theirs = losses(minutes), json.loads(beside.communicate()[0].splitlines()[-1])
    for policy, bound in BOUNDS.items():
        far = max(abs(a / b - 1) for a, b in zip(own[policy], theirs[policy], strict=True))
        note = ", ".join(f"{loss:.4f}" for loss in own[policy])
        yield figure(f"quickstart in {policy}: losses beside the CPU's", far, "off", ("at most", bound), note)


def checks() -> Iterator[Figure]:
    """What `jaxtrain doctor` finds; its exit code is 2 where something is missing that nothing here needs."""
    words = [sys.executable, "-m", "jaxtrain", "doctor", "--json"]
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout)
    for dtype, rate in found.get("matmul_gflops_per_second", {}).items():
        yield figure(f"matmul {dtype}", rate / 1e3, "TFLOP/s")
    problems = [one["what"] for one in found["problems"]]
    yield figure("problems that doctor finds", len(problems), "", ("at most", 0), "; ".join(problems))


def attention(minutes: Minutes) -> Iterator[Figure]:
    """cuDNN's attention beside the reference in float32."""
    from jaxtrain.ops.attention.reference import reference_attention
    from jaxtrain.ops.attention.rules import AttentionForm
    from jaxtrain.ops.attention.table import self_attention

    kernel = "cudnn" if jax.default_backend() == "gpu" else "blockwise"
    length, heads = (64, 2) if minutes.rehearse else (1024, 16)
    arrays = random_arrays(*((2, length, count, 64) for count in (heads, heads // 2, heads // 2, heads)))
    for form in (AttentionForm(), AttentionForm(window=length // 4)):
        attend = partial(self_attention, form=form, implementation=kernel)
        found = jax.jit(partial(with_gradients, attend))(*arrays)
        truth = partial(with_gradients, lambda q, k, v, form=form: reference_attention(q, k, v, None, form))
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(truth)(*(x.astype("float32") for x in arrays))
        name = f"{kernel} attention, window {form.window}: result and gradients"
        yield figure(name, difference(found, exact), "off", ("at most", 1e-2))


def decode(minutes: Minutes) -> Iterator[Figure]:
    from jaxtrain.precision.policy import cast_floats
    from jaxtrain.runtime.devices import memory_bytes_per_second

    hardware, measured = hardware_of(jax.devices()[0].device_kind), memory_bytes_per_second()
    bandwidth = (hardware and hardware.memory_bandwidth) or measured
    yield figure("memory", measured / 1e12, "TB/s", note=f"shares are of {bandwidth / 1e12:.3g} TB/s")
    sizes, batches = (("llama3.2_1b", "smollm2_135m"), (1, 32)) if not minutes.rehearse else (("smollm2_135m",), (2,))
    prompt, new = (512, 65) if not minutes.rehearse else (8, 5)
    for size in sizes:
        words = (*minutes.words(("llama3_8b", f"model.size={size}")), f"model.max_sequence_length={prompt + new}")
        model = jt.build_model(config_of(words).model, input_shape=(prompt + new,))
        sharded = jt.shard_model(model, policy="bf16")
        plain = jax.jit(lambda key, model=model: cast_floats(model.init(key)[0], jnp.bfloat16))(jax.random.key(0))
        for weights, batch in itertools.product(("bf16", "int8", "nf4"), batches):
            quantize = jax.jit(partial(jt.quantize, model=model, format=weights))
            params, name = plain if weights == "bf16" else quantize(plain), f"{size} {weights}, batch {batch}"
            yield from attempt(name, partial(decoded, name, sharded, params, (batch, prompt, new), bandwidth))


def decoded(name: str, sharded: Any, params: Any, shape: tuple[int, int, int], bandwidth: float) -> Iterator[Figure]:
    """The share of the bandwidth that a decode step must take, for all weights and the filled part of the cache."""
    from jaxtrain.inference.decoding import Writing, generation_pieces

    batch, prompt, new = shape
    encoded = list(np.random.default_rng(0).integers(0, 64, (batch, prompt)).astype(np.int32))
    writing, times = Writing(new, jt.Sampling(temperature=0), piece=new - 1), []
    for _ in range(4):  # the first compiles
        began = time.perf_counter()
        pieces = generation_pieces(sharded, params, encoded, writing)
        next(pieces)  # the prompts, and the first token of each
        middle = time.perf_counter()
        assert list(pieces)[-1].counts.tolist() == [new] * batch
        times.append((middle - began, (time.perf_counter() - middle) / (new - 1)))
    prefill, step = (statistics.median(column) for column in zip(*times[1:], strict=True))
    cache = jax.eval_shape(lambda: sharded.model.decoder.init_cache(batch, prompt + new, jnp.bfloat16))
    filled = (prompt + new / 2) / (prompt + new)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    needed += filled * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    note = (
        f"{batch / step:,.0f} tokens/s, {needed / 1e9:.3g} GB a step; prefill {batch * prompt / prefill:,.0f} tokens/s"
    )
    yield figure(f"{name}: share of the bandwidth", needed / step / bandwidth, "", ("at least", 0.7), note)


def experts(minutes: Minutes) -> Iterator[Figure]:
    from jaxtrain.ops.experts.grouped import grouped_matmul

    for name, multiply in (("our kernels", grouped_matmul), ("ragged_dot", jax.lax.ragged_dot)):
        yield from attempt(name, partial(grouped, minutes, name, multiply))
    words, steps = minutes.words(("gpt2_124m", *ONE, "train.global_batch_size=8")), 3 if minutes.rehearse else 12
    plain = trained(words, steps)
    note = f"loss {plain[0][0]:.3f} to {plain[0][-1]:.3f}"
    yield figure("GPT-2 124M, 8 rows: step", plain[1] * 1e3, "ms", note=note)
    for name, setting, bound in (("int8 moments", "moments=int8", 0.05), ("moments on the host", "offload=true", 1e-3)):
        yield from attempt(name, partial(beside, name, (*words, f"optimizer.{setting}"), plain, bound))


def beside(name: str, words: Sequence[str], plain: tuple[list[float], float, int], bound: float) -> Iterator[Figure]:
    """Losses, time and memory of a config over those of another one."""
    losses, seconds, size = trained(words, len(plain[0]))
    note = f"{seconds / plain[1]:.3g} x the time of a step, {size / plain[2]:.3g} x the device's bytes by the compiler"
    yield figure(f"{name}: last loss", abs(losses[-1] / plain[0][-1] - 1), "off", ("at most", bound), note)


def grouped(minutes: Minutes, name: str, multiply: Callable[..., Any]) -> Iterator[Figure]:
    """A grouped product beside the products of each expert in float32, and its speed."""
    from jaxtrain.bench.limits import call_seconds

    rows, count, inputs, outputs = (256, 4, 128, 128) if minutes.rehearse else (16384, 16, 2048, 8192)
    sizes = np.random.default_rng(0).multinomial(rows, [1 / count] * count).astype(np.int32)
    arrays = random_arrays((rows, inputs), (count, inputs, outputs), (rows, outputs))

    def exact(x: Any, kernels: Any) -> Any:
        parts = zip(jnp.split(x, np.cumsum(sizes)[:-1]), kernels, strict=True)
        return jnp.concatenate([jnp.matmul(part, kernel, precision="highest") for part, kernel in parts])

    both = jax.jit(lambda sizes, *arrays: with_gradients(lambda x, kernels: multiply(x, kernels, sizes), *arrays))
    truth = jax.jit(partial(with_gradients, exact))(*(one.astype("float32") for one in arrays))
    far, operations = difference(both(sizes, *arrays), truth), 3 * 2 * rows * inputs * outputs
    yield figure(f"{name}: result and gradients", far, "off", ("at most", 1e-2))
    rate = operations / call_seconds(lambda: both(sizes, *arrays)) / 1e12
    yield figure(f"{name}: forward and backward", rate, "TFLOP/s")


def resume(minutes: Minutes) -> Iterator[Figure]:
    """A run that is killed with signal 9 and started again, beside one that is left alone."""
    from jaxtrain.checkpoint import Checkpointer
    from jaxtrain.checkpoint.run_folder import checkpoint_folder
    from jaxtrain.metrics.history import read_rows

    steps = 60 if minutes.rehearse else 1000
    words = minutes.words(("bench_cpu", "data.kind=synthetic", "data.num_rows=512", "precision.policy=bf16"))
    words += (f"train.steps={steps}", f"checkpoint.every={steps // 4}", "logging.every=1")
    words = ("-m", "jaxtrain", "train", *words, "logging.tensorboard=false", "logging.report=false", "--run-dir")

    def losses_of(run_dir: Path) -> dict[Any, Any]:
        return {row["step"]: row["loss"] for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row}

    def digests_of(run_dir: Path) -> dict[Any, Any]:
        with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpointer:
            return dict(checkpointer.verify(steps).digests)

    with tempfile.TemporaryDirectory() as folder:
        killed, alone = Path(folder) / "killed", Path(folder) / "alone"
        process = subprocess.Popen([sys.executable, *words, str(killed)], stdout=subprocess.DEVNULL)
        while process.poll() is None and max(losses_of(killed), default=0) < steps // 2:
            time.sleep(0.02)
        process.kill()
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with exit code {process.returncode} before it was killed: see log.txt")
        last = max(losses_of(killed))
        command(*words, str(killed))
        command(*words, str(alone))
        for what, of in (("losses", losses_of), ("arrays of the last checkpoint", digests_of)):
            found, truth = of(killed), of(alone)
            apart = [str(key) for key in truth if found.get(key) != truth[key]]
            note = f"killed after step {last}" + (f"; they differ in {', '.join(apart[:3])}" if apart else "")
            yield figure(f"{what} that differ after kill -9", len(apart), f"of {len(truth)}", ("at most", 0), note)


# --- The parts by worth, and their seconds: 540 in all. ---

PARTS: dict[str, tuple[Callable[[Minutes], Iterator[Figure]], int]] = {
    "doctor": (doctor, 60),
    "llama": (llama, 190),
    "resnet": (resnet, 65),
    "plan": (plan, 40),
    "decode": (decode, 85),
    "experts": (experts, 55),
    "resume": (resume, 45),
}


def run_part(name: str, minutes: Minutes) -> None:
    """Be the process of a part: print and write each figure as soon as it is there."""
    for part in json.loads((minutes.out / "results.json").read_text())["parts"].values():
        minutes.benches |= part["benches"]
    found: dict[str, Any] = {"figures": [], "benches": minutes.benches}
    for one in PARTS[name][0](minutes):
        found["figures"].append(one)
        file = minutes.out / f"{name}.new"
        file.write_text(json.dumps(found))
        file.replace(file.with_suffix(".json"))  # at once: a part may be killed at any moment
        print(f"{name}: {one['name']}: {shown(one)} {verdict(one)}", flush=True)


def shown(one: Figure) -> str:
    value = "not available" if one["value"] is None else f"{one['value']:,.4g} {one['unit']}".strip()
    return value + (f" ({one['note']})" if one["note"] else "")


def verdict(one: Figure) -> str:
    return " ".join(filter(None, ({True: "met:", False: "MISSED:", None: ""}[one["met"]], one["goal"])))


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    about = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['card']}, {versions}, {about['date']}.", ""]
    lines += ["| part | figure | value | goal |", "|---|---|---|---|"]
    for part, found in results["parts"].items():
        rows = [(part, one["name"], shown(one), verdict(one)) for one in found["figures"]]
        rows += [(part, f"failed after {found['seconds']} s", found["error"], "")] if found["error"] else []
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def run_process(name: str, minutes: Minutes, seconds: float) -> dict[str, Any]:
    """Run a part for so many seconds at most, with all processes that it starts; its figures, and its error."""
    words = [sys.executable, sys.argv[0], "--part", name, "--out", str(minutes.out)]
    words += ["--rehearse"] if minutes.rehearse else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    file, error, began = minutes.out / f"{name}.json", None, time.monotonic()
    with (minutes.out / "log.txt").open("a+", encoding="utf-8", errors="replace") as log:
        start = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(words, stderr=log, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
        try:
            process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            error = f"not done within {seconds:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also those that a part left
        code = process.wait()
        log.seek(start)
        error = error or (last_line(log.read()) if code else None)
    found = json.loads(file.read_text()) if file.exists() else {"figures": [], "benches": {}}
    file.unlink(missing_ok=True)
    return {**found, "error": error, "seconds": round(time.monotonic() - began, 1)}


def machine() -> dict[str, Any]:
    """The card with its driver, the versions and the date."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else "no card"
    versions = {name: version for name, version in package_versions(PACKAGES).items() if version}
    return {"card": card, "versions": versions, "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    """Run the parts, and write the results after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), required="OUT" not in os.environ)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, and eight times as long for each part")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    minutes, chosen = Minutes(arguments.out.resolve(), arguments.rehearse), arguments.only.split(",")
    if arguments.part:
        run_part(arguments.part, minutes)
        return
    if not set(chosen) <= set(PARTS):
        parser.error(f"--only {arguments.only}: the parts are {','.join(PARTS)}")
    minutes.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "rehearsal": minutes.rehearse, "parts": {}}
    (minutes.out / "results.json").write_text(json.dumps(results))  # in place of those of an earlier run
    end = time.monotonic()
    for name in (one for one in PARTS if one in chosen):
        end += PARTS[name][1] * (8 if minutes.rehearse else 1)
        found = results["parts"][name] = run_process(name, minutes, end - time.monotonic())
        (minutes.out / "results.json").write_text(json.dumps(results, indent=1))
        (minutes.out / "table.md").write_text(table(results))
        print(f"{name}: {found['error'] or 'done'} after {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
