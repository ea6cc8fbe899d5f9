"""Llama-3 8B on 8 devices, sequences of 8,192: attention is fused, and no whole scores or logits are in the program."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = {
    "h100x8": ("jax_cuda12_plugin", "jaxtrain[aot]", "cudnn", "__cudnn$fmhaSoftmaxBackward"),
    "v5px8": ("libtpu", "jaxtrain[aot-tpu]", "splash", "tpu_custom_call"),
}


def inspect(name: str, *words: str) -> dict:
    package, extra, *_ = TARGETS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '{extra}'")
    program = Path(__file__).with_name("large_program.py")
    done = subprocess.run(
        [sys.executable, str(program), name, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)[name]


@pytest.mark.parametrize("name", TARGETS)
def test_attention_is_fused_and_logits_are_never_whole(name: str) -> None:
    found = inspect(name)
    *_, choice, kernel = TARGETS[name]
    assert f"attention: {choice}" in found["choices"]
    assert kernel in found["kernels"]
    assert found["squares"] == []
    assert found["logits"] == []


@pytest.mark.parametrize("name", TARGETS)
def test_the_plain_ones_are_seen_where_they_are_asked_for(name: str) -> None:
    """The same search finds the scores of a sequence and its logits in the program that has them."""
    found = inspect(name, "model.attention=reference", "loss.logits=whole")
    assert found["squares"]
    assert found["logits"]
