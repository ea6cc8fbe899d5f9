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
from jaxtrain.errors import ConfigError
from jaxtrain.precision.policy import POLICIES, Policy

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
    step: jt.TrainStep | jt.ShardedModel, params: Any, *prompts: str, sampling: jt.Sampling = GREEDY, seed: int = 0
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
    apply = jax.jit(lambda params, x: step.model.apply(params, {}, x, key=None, train=False)[0])
    logits_BLV = apply(params, jnp.array([list(prompt.encode())]))
    likeliest = int(logits_BLV[0, -1].argmax())
    text = jt.generate_text(step, params, ByteTokenizer(), [prompt], new_tokens=1, sampling=GREEDY)[0]
    assert text == ByteTokenizer().decode([*prompt.encode(), likeliest])
    assert generate(step, params, prompt)[0].startswith(prompt)


def test_a_policy_of_ones_own_is_the_one_that_generates(params):
    """Under a name that is not in the table, and under one that is."""
    for name in ("mine", "fp32"):
        sharded = make_step(dataclasses.replace(POLICIES["bf16"], name=name)).sharded_model
        decoder, dtypes = sharded.model.decoder, []
        assert decoder is not None

        def init_cache(batch: int, length: int, dtype: Any, decoder: Any = decoder, dtypes: Any = dtypes) -> Any:
            dtypes.append(dtype)
            return decoder.init_cache(batch, length, dtype)

        watched = dataclasses.replace(sharded.model, decoder=dataclasses.replace(decoder, init_cache=init_cache))
        assert generate(dataclasses.replace(sharded, model=watched), params, "hello")[0].startswith("hello")
        assert dtypes == [jnp.bfloat16]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": v} for v in (float("nan"), float("inf"), -1.0, "1")]
    + [{"top_k": v} for v in (0, 2.5, True)]
    + [{"top_p": v} for v in (0.0, 1.5, float("nan"))],
    ids=str,
)
def test_sampling_that_means_nothing_is_one_line(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} is [^\n]*; use [^\n]*$"):
        jt.Sampling(**wrong)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "words"),
    [(["a"], 0, "new_tokens is 0"), (["a"], -3, "new_tokens is -3"), (["a"], 2.0, "new_tokens"), ("the", 3, "a list")],
    ids=["none", "negative", "a float", "one text"],
)
def test_a_request_for_no_text_is_one_line(step, params, prompts, new_tokens, words):
    with pytest.raises(ConfigError, match=words) as caught:
        jt.generate_text(step, params, ByteTokenizer(), prompts, new_tokens=new_tokens, sampling=GREEDY)
    assert "\n" not in str(caught.value)


def test_no_prompts_give_no_texts(step, params):
    assert generate(step, params) == []


@pytest.mark.long
def test_padding_does_not_make_a_text_a_long_one(params):
    """Under longrope, whose other factors are for caches beyond `original_length`."""

    def text(long_factor: float) -> list[str]:
        scaling = dict(kind="longrope", original_length=20, short_factors=[1.0] * 4, long_factors=[long_factor] * 4)
        config = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 64}
        model = jt.build_model({**config, "rope_scaling": scaling}, input_shape=(64,), vocab_size=256)
        larger = jax.tree.map(lambda x: 8 * x, params)  # so that positions decide
        return generate(
            jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1])), larger, "hello", "a longer o"
        )

    assert text(1.0) == text(40.0)
