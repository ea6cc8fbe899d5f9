"""`--check` says in one line whether transformers computes the same, and where it first does not.

transformers is not installed beside jaxtrain here: a stand-in answers as it does, with our own numbers, some of them
moved.
"""

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import load_pretrained
from jaxtrain.commands import published as commands
from jaxtrain.interop import check

LLAMA = Path(__file__).parent / "published" / "llama"


class Numbers(np.ndarray):
    """An array with what the command asks of a tensor of torch."""

    def float(self):
        return self

    def numpy(self):
        return np.asarray(self)


def tensor(array):
    return np.asarray(array).view(Numbers)


class Answer(dict):
    """What transformers answers: entries that are attributes too."""

    __getattr__ = dict.__getitem__


@functools.cache
def computed(tokens):
    """Logits and the states of each layer of our own model."""
    pretrained, ids = load_pretrained(LLAMA, model={"attention": "reference"}), jnp.asarray(tokens)
    apply = jax.jit(lambda params: pretrained.model.apply(params, {}, ids, key=None, train=False)[0])
    return apply(pretrained.params), [*check._hidden_states(pretrained, ids)]


def opened(moved):
    """A class of transformers whose model moves what it computes from a layer on; None: nothing."""

    def call(*, input_ids, output_hidden_states):
        logits, states = computed(tuple(map(tuple, np.asarray(input_ids).tolist())))
        states = list(states)
        if moved is not None:
            logits, states[moved:] = logits + 1, [state + 1 for state in states[moved:]]
        return Answer(logits=tensor(logits), hidden_states=[*map(tensor, states)])

    call.eval = lambda: call
    return SimpleNamespace(from_pretrained=lambda **_: call)


def stand_in(monkeypatch, opener):
    quiet = SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
    transformers = SimpleNamespace(__version__="5", logging=quiet, **opener)
    torch = SimpleNamespace(float32=None, no_grad=contextlib.nullcontext, from_numpy=lambda array: array)
    monkeypatch.setattr(check, "import_transformers", lambda: (torch, transformers))
    monkeypatch.setattr(commands, "import_transformers", lambda: None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("moved", "code", "said"),
    [(None, 0, "first differing layer: none"), (1, 4, "first differing layer: layer 0")],
    ids=["the same", "the first of two layers"],
)
def test_one_line_names_the_first_that_differs(cli, monkeypatch, moved, code, said):
    stand_in(monkeypatch, {"LlamaForCausalLM": opened(moved)})
    answer = cli("import", str(LLAMA), "--check")
    assert answer.code == code, answer.err
    (line,) = (answer.out if code == 0 else answer.err).strip().splitlines()
    assert line.endswith(said)
    assert ("equal to transformers 5 to" if code == 0 else "differs from transformers 5 by") in line


def test_what_transformers_does_not_have_is_said(cli, monkeypatch):
    stand_in(monkeypatch, {})
    answer = cli("import", str(LLAMA), "--check")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "transformers 5 has no LlamaForCausalLM" in answer.err
