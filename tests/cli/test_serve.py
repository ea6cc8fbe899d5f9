"""`jaxtrain serve`: a model over HTTP, from the command to the signal that ends it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import openai
import pytest

import jaxtrain as jt
from jaxtrain.data.chat.templates import BUILT_IN
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.open import open_model
from jaxtrain.inference.server.app import build_app
from jaxtrain.inference.server.serve import start_service

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ByteTokenizer(("<|im_start|>", "<|im_end|>"))
GROUP = {
    "kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 64,
    "vocab_size": 258,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A published folder of a small transformer over bytes, which chats."""
    model = jt.build_model(GROUP, input_shape=(64,))
    params, _ = jax.jit(model.init)(jax.random.key(0))
    found = jt.save_pretrained(tmp_path_factory.mktemp("served") / "tiny", params, model=GROUP)
    TOKENIZER.save(found / "tokenizer.json")
    (found / "chat_template.jinja").write_text(BUILT_IN["chatml"])
    (found / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return found


@pytest.fixture(scope="module")
def opened(folder):
    return open_model(folder, mesh=jt.make_mesh(devices=jax.devices()[:1]))


@pytest.mark.long
def test_answers_are_those_of_the_model(opened):
    """From a published folder over the engine and HTTP: greedy text is that of `generate_ids`."""
    from starlette.testclient import TestClient

    service = start_service(opened, "tiny", slots=2, length=32, queue=4)
    try:
        with TestClient(build_app(service), "http://localhost") as client:
            body = {"model": "tiny", "prompt": ["Hello", "A"], "max_tokens": 6, "temperature": 0, "logprobs": 1}
            found = client.post("/v1/completions", json=body).json()
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi" * 8}]}
            refused = client.post("/v1/chat/completions", json=chat).json()
    finally:
        service.engine.close()
    encoded = [np.array(list(text.encode()), np.int32) for text in body["prompt"]]
    expected_BT = generate_ids(
        opened.sharded_model, opened.params, encoded, new_tokens=6, sampling=jt.Sampling(temperature=0)
    )
    for choice, expected_T in zip(found["choices"], expected_BT, strict=True):
        ended = np.flatnonzero(expected_T == 257)
        kept = expected_T[: ended[0] if len(ended) else None]
        assert choice["text"] == TOKENIZER.decode(kept.tolist())
        assert [max(top, key=top.get) for top in choice["logprobs"]["top_logprobs"]] == choice["logprobs"]["tokens"]
    assert "a prompt of 35 tokens and 1 new ones" in refused["error"]["message"]


@pytest.mark.long
def test_the_process_from_start_to_sigterm(folder, tmp_path):
    """A key from a file, the real client, an answer that runs when the signal comes, and exit code 0."""
    (tmp_path / "key").write_text("s3cret\n")
    words = ["serve", str(folder), "--port", "0", "--slots", "2", "--api-key-file", str(tmp_path / "key")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", *words, "--name", "mine"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready: http://127.0.0.1:"), process.communicate()
        with openai.OpenAI(base_url=f"{ready.split()[1]}/v1", api_key="s3cret", max_retries=0) as client:
            stream = client.completions.create(model="mine", prompt="a", max_tokens=60, stream=True)
            pieces = [next(stream)]
            process.send_signal(signal.SIGTERM)
            pieces += list(stream)
            assert pieces[-1].choices[0].finish_reason in ("length", "stop")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.mark.long
def test_load_beside_clients_that_misbehave():
    """The short form of what `scripts/load_serve.py` does for five minutes; it ends with 1 where anything was wrong."""
    words = [sys.executable, str(ROOT / "scripts" / "load_serve.py"), "--minutes", "0.034", "--clients", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing was wrong\n")
