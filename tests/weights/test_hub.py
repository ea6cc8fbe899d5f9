"""Models and data by their id on the Hugging Face hub: its own client against a stand-in for the hub on loopback."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jaxtrain as jt

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What the client asks of a hub with two models, of which one is gated, and one dataset."""

    repositories: dict[str, dict[str, bytes]]
    fetched: list[str]

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked=None):
        path = unquote(urlsplit(self.path).path)
        if path == "/ended":
            self.fetched.append("ended")
        name = next((name for name in self.repositories if f"/{name}/" in f"{path}/"), None)
        if name is None:
            return self.send(401, headers={"X-Error-Code": "RepoNotFound"})
        files = self.repositories[name]
        rest = path.partition(name)[2].strip("/").split("/")
        if not path.startswith("/api/"):
            content = files.get("/".join(rest[2:]))
            if name.endswith("gated"):
                return self.send(403, headers={"X-Error-Code": "GatedRepo"})
            if content is None:
                return self.send(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            if self.command == "GET":
                self.fetched.append("/".join(rest[2:]))
            return self.send(200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})
        if rest[0] in ("tree", "paths-info"):
            paths = asked["paths"] if asked else files
            below = "/".join(rest[2:])
            found = [
                {"type": "file", "path": path, "size": len(files[path]), "oid": digest(files[path])}
                for path in paths
                if path in files and path.startswith(below)
            ]
            return self.send(200, json.dumps(found).encode())
        siblings = [{"rfilename": path} for path in files]
        about = {"id": name, "_id": "1", "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
        return self.send(200, json.dumps(about).encode())

    def send(self, status, content=b"", headers=None):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path):
    group = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 32}
    model = jt.build_model(jt.load_config({"model": group}).config.model, input_shape=(32,))
    folder = jt.save_pretrained(tmp_path / "tiny", jax.jit(model.init)(jax.random.key(0))[0], model=group)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    tiny = {path.name: path.read_bytes() for path in folder.iterdir()}
    text = "".join(f"line {number} of a text on the hub\n" for number in range(400)).encode()
    Hub.repositories = {"people/tiny": tiny, "people/gated": tiny, "people/texts": {"data/train.txt": text}}
    Hub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cache = {"HF_HOME": str(tmp_path / "hub"), "JAXTRAIN_CACHE_DIR": str(tmp_path / "cache")}
    yield {**os.environ, **cache, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()
    server.server_close()


COMMANDS = """
import json, os, sys, urllib.error, urllib.request
from jaxtrain.cli import main
for number, words in enumerate(json.loads(sys.argv[1])):
    code = main(words)
    print(f"code of {number}: {code}", file=sys.stderr, flush=True)
    try:
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/ended")
    except urllib.error.HTTPError:
        pass
"""


def jaxtrain(commands, environment, folder):
    """What the commands said, one after another in one process, each with its exit code."""
    words = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    said = re.split(r"code of \d+: (\d+)\n", done.stderr)
    assert len(said) == 2 * len(commands) + 1, done.stderr
    return list(zip(said[::2], map(int, said[1::2]), strict=False))


@pytest.mark.long
def test_models_and_texts_are_used_by_their_ids_and_a_plan_fetches_no_weights(hub, tmp_path):
    model = "model.from=people/tiny"
    plan = ["plan", "quickstart", model, "data.sequence_length=32", "--analytic", "--on", "h100"]
    short = ["train.steps=2", "train.global_batch_size=2", "data.sequence_length=32", "logging.report=false"]
    data = ["data.kind=text", "data.path=hf://datasets/people/texts/data/train.txt"]
    train = ["train", "quickstart", model, *data, *short, "parallel.data=1", "evaluation.every=null"]
    wrong = [["train", "quickstart", f"model.from=people/{name}"] for name in ("gated", "nobody")]
    _, trained, gated, nobody = found = jaxtrain([plan, [*train, "--run-dir", "run"], *wrong], hub, tmp_path)
    assert [code for _, code in found] == [0, 0, 2, 2], found
    ended = Hub.fetched.index("ended")
    assert "config.json" in Hub.fetched[:ended]
    assert not [name for name in Hub.fetched[:ended] if name.endswith(".safetensors")]
    assert {"model.safetensors", "data/train.txt"} <= set(Hub.fetched)
    for (said, _), says in ((gated, "is gated"), (nobody, "is neither on this machine nor at")):
        assert says in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    # The run names the commit, and the hub's cache is all that a second one takes.
    said = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["model"]["from"]
    assert said.endswith(f"models--people--tiny/snapshots/{COMMIT}"), trained
    Hub.fetched.clear()
    offline = {**hub, "HF_HUB_OFFLINE": "1"}
    assert jaxtrain([["sample", "people/tiny", "-p", "a", "-n", "2"]], offline, tmp_path)[0][1] == 0
    assert Hub.fetched == ["ended"]
