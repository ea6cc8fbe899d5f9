"""An address of an object store is refused wherever a path is taken, and never becomes a folder."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.config.data import TextData
from jaxtrain.config.local_path import local_path
from jaxtrain.data import prepare_tokens
from jaxtrain.errors import UserError
from jaxtrain.runtime.compilation_cache import cache_folder

STORE = "is not a path on this machine; use a local folder, or mount the store and give its folder"
RUN = (
    "is not a path on this machine; use a local folder; checkpoints alone can be elsewhere: "
    "checkpoint.directory=gs://bucket/name (or s3://)"
)


@pytest.mark.parametrize("path", ["runs/a", "/tmp/a", "C:/a", "a:b", "a/b:/c", "~/a", Path("runs")], ids=str)
def test_a_path_is_a_path(path):
    assert local_path(path, what="run directory") == Path(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://b/run", f"run directory gs://b/run {STORE}"),
        ("S3://b", f"run directory s3://b {STORE}"),
        (Path("gs://b/run"), f"run directory gs://b/run {STORE}"),
        ("file:///tmp/a", "run directory file:///tmp/a is an address; write it as a path: /tmp/a"),
    ],
    ids=str,
)
def test_an_address_is_refused(path, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        local_path(path, what="run directory")


# id: (words, exit code, what the address is)
COMMANDS = {
    "train into": ("train quickstart --run-dir gs://b/run", 2, "run directory gs://b/run"),
    "train into S3": ("train quickstart --run-dir s3://b/run", 2, "run directory s3://b/run"),
    "train into a hub": ("train quickstart --run-dir hf://b/run", 2, "run directory hf://b/run"),
    "train into a site": ("train quickstart --run-dir http://b/run", 2, "run directory http://b/run"),
    "train by name": ("train quickstart name=gs://b/run", 2, "name gs://b/run"),
    "train a config of": ("train s3://b/a.yaml", 2, "config s3://b/a.yaml"),
    "train on text of": ("train quickstart data.path=az://b/*.txt --run-dir run", 3, "data.path az://b/*.txt"),
    "train on shards of": (
        "train quickstart data.kind=tokens data.path=az://b/t --run-dir run",
        3,
        "data.path az://b/t",
    ),
    "train on a table of": (
        "train tabular_mlp data.path=ftp://b/t.csv --run-dir run",
        3,
        "data.path ftp://b/t.csv",
    ),
    "compile into": ("train quickstart compilation_cache=gs://b/c --run-dir run", 2, "compilation_cache gs://b/c"),
    "evaluate": ("eval gs://b/run", 2, "run directory gs://b/run"),
    "sample": ("sample gs://b/run -p a", 2, "run directory gs://b/run"),
    "list": ("ckpt ls gs://b/run", 2, "run directory gs://b/run"),
    "show": ("ckpt show gs://b/run", 2, "run directory gs://b/run"),
    "prepare": ("data prepare quickstart -o gs://b/t", 2, "--output gs://b/t"),
    "bench": ("bench --out gs://b/t", 2, "--out gs://b/t"),
}


@pytest.mark.parametrize(("words", "code", "address"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_refuses_it_and_leaves_nothing(cli, tmp_path, monkeypatch, words, code, address):
    monkeypatch.chdir(tmp_path)
    answer = cli(*words.split())
    last = answer.err.splitlines()[-1]
    said = RUN if words.startswith("train quickstart") and address.startswith(("run directory", "name")) else STORE
    assert (answer.code, answer.out, last) == (code, "", f"jaxtrain: {address} {said}")
    assert [path for path in tmp_path.iterdir() if path.name != "run"] == []


CALLS: dict[str, Callable[[], object]] = {
    "run_config": lambda: jt.run_config("quickstart", run_dir="gs://b/run"),
    "run_config with a Path": lambda: jt.run_config("quickstart", run_dir=Path("gs://b/run")),
    "metrics": lambda: jt.JsonlWriter("gs://b/metrics.jsonl"),
    "data": lambda: jt.open_data({"kind": "text", "path": "az://b/a.txt"}, sequence_length=8),
    "shards": lambda: prepare_tokens(TextData(), Path("gs://b/t")),
    "compiled programs": lambda: cache_folder("gs://b/c"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_refuses_it_and_leaves_nothing(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"(gs|az)://b.* ({re.escape(STORE)}|{re.escape(RUN)})$"):
        call()
    assert list(tmp_path.iterdir()) == []
