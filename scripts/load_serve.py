"""Load on `jaxtrain serve`: clients with the real openai package, and beside them clients that misbehave.

    python scripts/load_serve.py [--minutes 5] [--clients 64] [--slots 8]

A small model with random weights is served. Every prompt has one greedy answer, computed beforehand without the engine
and the server, so that an answer that is mixed up with another or broken off is seen. Every client is a process of its
own. Beside them others are killed in the middle of a stream (kill -9) or send half of a body. The exit code is 0 if
nothing was wrong: no error, no answer but the known ones, no program compiled after the start, no request left over,
and memory that stays (from two minutes on).
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NAME, LENGTH, TOKENS, PROMPTS = "tiny", 192, 24, 128
# Bytes of every size of prompt up to this one.
LONGEST_PROMPT = 120
# Of each client, also in a run of seconds.
LEAST_ASKED = 3
# Longer than any answer takes on a loaded machine; what comes later counts as lost.
LOST_SECONDS = 120
# From the end of the first fifth to the end of the run: a cache of Python objects may still fill up.
MOST_GROWTH = 0.05
Counts = collections.Counter[str]


def known_answers(folder: str) -> dict[str, dict[str, str]]:
    """Write a model into a folder and compute what it answers; runs in a process of its own, which starts jax.

    Returns:
        Kind of request (completion, chat) -> prompt -> answer.
    """
    import jax
    import numpy as np

    import jaxtrain as jt
    from jaxtrain.data.chat.conversation import Conversation
    from jaxtrain.data.chat.templates import BUILT_IN
    from jaxtrain.data.tokenizer import ByteTokenizer
    from jaxtrain.inference.decoding import generate_ids
    from jaxtrain.inference.open import open_model
    from jaxtrain.inference.prompts import PromptReader

    tokenizer = ByteTokenizer(("<|im_start|>", "<|im_end|>"))
    sizes = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "max_sequence_length": LENGTH, "vocab_size": 258}
    group = {"kind": "transformer", **sizes}
    model = jt.build_model(group, input_shape=(LENGTH,))
    params, _ = jax.jit(model.init)(jax.random.key(1))
    # Weights as they are drawn answer every prompt alike; larger ones do not, and leave no ties that rounding decides.
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params)
    found = jt.save_pretrained(folder, params, model=group)
    tokenizer.save(found / "tokenizer.json")
    (found / "chat_template.jinja").write_text(BUILT_IN["chatml"])
    (found / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))

    served = open_model(found)
    reader = PromptReader(served.text_tokenizer(), served.chat, served.special)
    drawn, answers = random.Random(0), {}
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = ["".join(drawn.choices(letters, k=drawn.randint(1, LONGEST_PROMPT))) for _ in range(PROMPTS)]
    for kind, read in (
        ("completion", reader.of_text),
        ("chat", lambda text: reader.of_chat(Conversation("chat", ({"role": "user", "content": text},)))),
    ):
        encoded = [np.array(read(text), np.int32) for text in texts]
        greedy, stops = jt.Sampling(temperature=0), reader.stop_tokens
        new_BT = generate_ids(served.sharded_model, served.params, encoded, new_tokens=TOKENS, sampling=greedy)
        answers[kind] = {text: _answer(new.tolist(), stops) for text, new in zip(texts, new_BT, strict=True)}
    return answers


def _answer(tokens: list[int], stops: frozenset[int]) -> str:
    """The bytes before a stop, without special tokens, as text."""
    end = next((index for index, token in enumerate(tokens) if token in stops), len(tokens))
    return bytes(token for token in tokens[:end] if token < 256).decode(errors="replace")


def good_client(address: str, answers: dict[str, dict[str, str]], end: float, seed: int) -> Counts:
    """Ask until the end of the run, three times at least, and compare every answer."""
    import openai

    drawn, counts, asked = random.Random(seed), Counts(), 0
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=LOST_SECONDS) as client:
        while asked < LEAST_ASKED or time.monotonic() < end:
            asked += 1
            kind = drawn.choice(("completion", "chat"))
            prompt, streamed = drawn.choice(list(answers[kind])), drawn.random() < 0.5
            try:
                answer = _ask(client, kind, prompt, streamed=streamed)
            except openai.APIError as error:
                counts[f"error: {type(error).__name__}: {' '.join(str(error).split())[:80]}"] += 1
                time.sleep(0.1)
            else:
                counts["answers"] += 1
                counts["streams"] += streamed
                counts["other answers than the known one"] += answer != answers[kind][prompt]
    return counts


def _ask(client: Any, kind: str, prompt: str, *, streamed: bool) -> str:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": TOKENS, "temperature": 0, "stream": streamed}
    if kind == "chat":
        found = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked)
        if not streamed:
            return found.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in found)
    found = client.completions.create(prompt=prompt, **asked)
    return "".join(chunk.choices[0].text for chunk in found) if streamed else found.choices[0].text


def killed_clients(address: str, answers: dict[str, dict[str, str]], end: float, seed: int) -> Counts:
    """Start clients that stream, and kill them: kill -9, at any moment."""
    drawn, counts = random.Random(seed), Counts()
    while time.monotonic() < end:
        child = os.fork()
        if child == 0:
            try:
                good_client(address, answers, end, drawn.randrange(2**32))
            finally:
                os._exit(0)
        time.sleep(drawn.uniform(0.05, 2.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts["clients killed"] += 1
    return counts


def half_bodies(address: str, answers: dict[str, dict[str, str]], end: float, seed: int) -> Counts:
    """Send half of a body, and leave at once or a little later."""
    drawn, counts = random.Random(seed), Counts()
    host, port = address.removeprefix("http://").split(":")
    while time.monotonic() < end:
        with socket.create_connection((host, int(port)), timeout=LOST_SECONDS) as half:
            half.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + b'{"model": "ti'
            )
            time.sleep(drawn.choice((0.0, 0.5)))
        counts["half bodies"] += 1
        time.sleep(0.05)
    return counts


MISBEHAVING = (killed_clients, killed_clients, half_bodies)


@contextlib.contextmanager
def server(folder: str, slots: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a folder: the process, and the address."""
    words = ["serve", folder, "--port", "0", "--name", NAME, "--slots", str(slots), "--length", str(LENGTH)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain", *words], env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready.startswith("ready: "):
                said.seek(0)
                sys.exit(f"the server did not start: {said.read()}")
            yield process, ready.split()[1]
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=LOST_SECONDS)
            said.seek(0)
            remarks = said.read()
            if process.returncode != 0 or "Traceback" in remarks or "failed" in remarks:
                sys.exit(f"the server ended with {process.returncode}: {remarks[-2000:]}")
        finally:
            process.kill()
            process.wait()


def watch(process: subprocess.Popen[str], address: str, end: float) -> list[float]:
    """Look at the server once per second: its resident MB."""
    found = [_resident_mb(process.pid)]
    while time.monotonic() < end:
        found.append(_resident_mb(process.pid))
        if len(found) % 30 == 1:
            print(f"{found[-1]:.0f} MB, {_metrics(address)}", flush=True)
        time.sleep(1)
    return found


def _resident_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        if found:
            return int(found[1]) / 1024
    return 0.0


def _metrics(address: str) -> dict[str, int]:
    import httpx

    text = httpx.get(f"{address}/metrics", timeout=LOST_SECONDS).text
    names = ("requests_total", "slots_in_use", "queued", "generated_tokens_total")
    return {name: int(re.search(rf"^jaxtrain_{name} (\d+)$", text, re.MULTILINE)[1]) for name in names}  # pyright: ignore[reportOptionalSubscript] the server has an engine


def run_client(work: Callable[..., Counts], *given: Any) -> Counts:
    """Be one client, in a process of its own."""
    try:
        return work(*given)
    except Exception as error:  # whatever it is, it is counted
        return Counts({f"error: {work.__name__} ended with {type(error).__name__}: {error}"[:160]: 1})


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve, ask and count."""
    import httpx  # noqa: F401 the clients that are forked share it
    import openai  # noqa: F401 as above

    works = [good_client] * arguments.clients + list(MISBEHAVING)
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(len(works)) as pool:
        with get_context("spawn").Pool(1) as other:
            answers = other.apply(known_answers, (str(Path(folder) / NAME),))
        with server(str(Path(folder) / NAME), arguments.slots) as (process, address):
            end = time.monotonic() + 60 * arguments.minutes
            begun = [
                pool.apply_async(run_client, (work, address, answers, end, seed)) for seed, work in enumerate(works)
            ]
            memory = watch(process, address, end)
            counts = sum((one.get() for one in begun), Counts())
            deadline = time.monotonic() + LOST_SECONDS
            while (left := _metrics(address))["slots_in_use"] and time.monotonic() < deadline:
                time.sleep(0.1)
            memory.append(_resident_mb(process.pid))
    return {"counts": dict(counts), "engine": left, "memory_mb": memory}


def judge(found: dict[str, Any], minutes: float) -> list[str]:
    """What is wrong, one line each."""
    counts, engine, memory = found["counts"], found["engine"], found["memory_mb"]
    wrong = [f"{count} x {name}" for name, count in counts.items() if count and name.startswith(("error", "other"))]
    if not counts.get("answers"):
        wrong.append("no answers")
    if engine["slots_in_use"] or engine["queued"]:
        wrong.append(f"requests are left over: {engine}")
    early, last = memory[len(memory) // 5], memory[-1]
    if minutes >= 2 and last > early * (1 + MOST_GROWTH):
        wrong.append(f"memory grew from {early:.0f} to {last:.0f} MB after the first fifth")
    return wrong


def main() -> int:
    """Run it and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    arguments = parser.parse_args()
    found = run(arguments)
    wrong = judge(found, arguments.minutes)
    for name, count in sorted(found["counts"].items()):
        if count:
            print(f"{count:8d}  {name}")
    memory = found["memory_mb"]
    shown = ", ".join(f"{mb:.0f}" for mb in memory[:: max(1, len(memory) // 10)])
    print(f"engine: {found['engine']}\nmemory of the server, MB: {shown}; at the end {memory[-1]:.0f}")
    print("\n".join(f"WRONG: {line}" for line in wrong) or "nothing was wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
