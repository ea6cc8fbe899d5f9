"""Text generation: the policy it runs under, what it compiles, and what padding leaves unchanged."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxtrain as jt
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.precision import POLICIES, Policy

GREEDY = jt.Sampling(temperature=0.0)


def make_step(policy: str | Policy = "fp32") -> jt.TrainStep:
    """A one-layer transformer over bytes with room for 64 tokens, on one device."""
    model = jt.build_model(
        {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 64},
        input_shape=(64,),
        vocab_size=256,
    )
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    return jt.make_train_step(model, jt.language_modeling(), optax.identity(), mesh=mesh, policy=policy)


def generate(
    step: jt.TrainStep, params: Any, *prompts: str, sampling: jt.Sampling = GREEDY, seed: int = 0
) -> list[str]:
    return jt.generate_text(step, params, ByteTokenizer(), prompts, new_tokens=8, sampling=sampling, seed=seed)


@pytest.fixture(scope="module")
def step() -> jt.TrainStep:
    return make_step()


@pytest.fixture(scope="module")
def params(step: jt.TrainStep) -> Any:
    return step.init(0).params


def test_a_second_call_compiles_nothing(step, params, caplog):
    generate(step, params, "hello")
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        generate(step, params, "hello")
        generate(step, params, "another one", seed=1)  # of another length
    assert [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()] == []


@pytest.mark.parametrize("prompt", ["hello", "x" * 56], ids=["padded", "all the room there is"])
def test_the_next_token_is_the_likeliest_after_the_prompt_without_padding(step, params, prompt):
    logits_BLV, _ = step.model.apply(params, {}, jnp.array([list(prompt.encode())]), key=None, train=False)
    likeliest = int(logits_BLV[0, -1].argmax())
    text = jt.generate_text(step, params, ByteTokenizer(), [prompt], new_tokens=1, sampling=GREEDY)[0]
    assert text == ByteTokenizer().decode([*prompt.encode(), likeliest])
    assert generate(step, params, prompt)[0].startswith(prompt)


def test_a_policy_of_ones_own_is_the_one_that_generates(params, monkeypatch):
    """Under a name that is not in the table, and under one that is."""
    for name in ("mine", "fp32"):
        step = make_step(dataclasses.replace(POLICIES["bf16"], name=name))
        decoder, dtypes = step.model.decoder, []
        assert decoder is not None

        def init_cache(batch: int, length: int, dtype: Any, decoder: Any = decoder, dtypes: Any = dtypes) -> Any:
            dtypes.append(dtype)
            return decoder.init_cache(batch, length, dtype)

        monkeypatch.setattr(
            step, "model", dataclasses.replace(step.model, decoder=dataclasses.replace(decoder, init_cache=init_cache))
        )
        assert generate(step, params, "hello")[0].startswith("hello")
        assert dtypes == [jnp.bfloat16]
