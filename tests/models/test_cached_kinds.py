"""Decoders of every structure write the same with their cache as without it: logits at each position, greedy tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.inference.decoding import Writing, generate_ids, row_rules, start_function
from jaxtrain.inference.sampling import Sampling
from jaxtrain.models.shipped import block
from jaxtrain.models.shipped.build import build_model

# 40 tokens, and texts longer than any window and than what yarn was stretched from.
SMALL = dict(
    kind="transformer", num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, vocab_size=40, max_sequence_length=32
)  # fmt: skip
PROMPT, NEW = 7, 9
LENGTHS = np.array([PROMPT, 4], np.int32)
KINDS = {
    "relative": dict(position="relative", relative_buckets=8, relative_max_distance=6),
    "yarn": dict(rope_scaling=dict(kind="yarn", factor=4.0, original_length=8), sliding_window=3),
    "local layers": dict(
        local_layers=dict(pattern=[1, 0], window=3, rope_theta=100.0), block="sandwich", logits_softcap=3.0
    ),
    "parallel": dict(block="parallel", norm="layernorm", bias=True, rotary_fraction=0.5),
    "layers without positions": dict(
        rope_layers=[1, 0],
        rotary_interleaved=True,
        qk_norm="whole",
        block="output",
        output_bias=True,
        attention_sinks=True,
    ),
    "latents": dict(
        latent=dict(query_rank=6, key_value_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
        experts=dict(num_experts=4, dense_layers=1, dense_dim=12),
    ),
    "chunks": dict(
        local_layers=dict(pattern=[1, 0], window=5, chunked=True),
        rope_layers=[1, 0],
        qk_norm="rotated",
        attention_temperature=dict(scale=0.7, step=4),
    ),
    "norm of embeddings in the first layer": dict(embedding_norm="first_layer", activation="geglu_exact"),
    "post": dict(block="post", norm="layernorm", position="learned"),
}
PLAIN = ("relative",)


def rows():
    return [name if name in PLAIN else pytest.param(name, marks=pytest.mark.long) for name in KINDS]


def drawn(name):
    """A model whose kernels, norms and tables are all large enough to show in the logits."""
    model = build_model({**SMALL, **KINDS[name]}, input_shape=(16,))
    shapes, rng = jax.eval_shape(model.init, jax.random.key(0))[0], np.random.default_rng(1)
    return model, jax.tree.map(lambda leaf: rng.normal(0.2, 0.3, leaf.shape).astype(np.float32), shapes)


def logits_of(outputs):
    return outputs["logits"] if isinstance(outputs, dict) else outputs


def tokens():
    return np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, PROMPT + NEW), dtype=np.int32)


@pytest.mark.parametrize("name", rows())
def test_the_cache_changes_nothing(name):
    model, params = drawn(name)
    whole = jax.jit(lambda text: logits_of(model.apply(params, {}, text, key=None, train=False)[0]))
    text, decode = tokens(), jax.jit(model.decoder.decode)
    entries, found = model.decoder.init_cache(2, PROMPT + NEW, jnp.float32), []
    for at in range(PROMPT + NEW):
        logits, entries = decode(params, text[:, at : at + 1], np.full((2, 1), at, np.int32), entries)
        found.append(logits)
    wanted = whole(text)
    # float32, the same sums over keys in another order.
    np.testing.assert_allclose(np.concatenate(found, 1), wanted, rtol=0, atol=1e-4 * np.ptp(wanted))

    prompts = np.where(np.arange(PROMPT) < LENGTHS[:, None], text[:, :PROMPT], 0)
    sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    rows = [row[:length] for row, length in zip(prompts, LENGTHS, strict=True)]
    found = generate_ids(sharded, params, rows, new_tokens=NEW, sampling=Sampling(temperature=0))
    written, greedy = text * 0, []
    written[:, :PROMPT] = prompts
    for step in range(NEW):  # what stands behind a position changes nothing at it
        last = np.asarray(whole(written))[[0, 1], LENGTHS + step - 1]
        greedy.append(last.argmax(-1))
        written[[0, 1], LENGTHS + step] = greedy[-1]
    np.testing.assert_array_equal(found, np.stack(greedy, 1))


def test_a_prompt_has_logits_at_its_last_position_alone():
    model, params = drawn("relative")
    shape = f"f32[2,{PROMPT},{SMALL['vocab_size']}]"
    sharded = jt.shard_model(model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    start = start_function(sharded, new_tokens=2)
    rules = row_rules(Writing(2, Sampling(temperature=0)), 2)
    program = str(jax.make_jaxpr(start)(params, tokens()[:, :PROMPT], LENGTHS, rules))
    assert shape not in program
    assert f"f32[2,1,{SMALL['vocab_size']}]" in program or f"f32[2,{SMALL['vocab_size']}]" in program


@pytest.mark.long
@pytest.mark.parametrize("name", ["relative", "local layers", "chunks"])
def test_a_long_cache_is_read_in_blocks_up_to_the_last_position(name, monkeypatch):
    """Blocks of 5 in place of 256, the last of which overlaps the one before it."""
    model, params = drawn(name)
    whole, text = model.apply(params, {}, tokens(), key=None, train=False)[0], tokens()
    monkeypatch.setattr(block, "BLOCK", 5)
    decode, found = jax.jit(model.decoder.decode), []
    for length in (PROMPT + NEW + 1, PROMPT + NEW + 3):
        entries, parts = model.decoder.init_cache(2, length, jnp.float32), []
        for part in (slice(0, 5), slice(5, 6), slice(6, 13), slice(13, 16)):
            order = np.broadcast_to(np.arange(16, dtype=np.int32)[part], (2, part.stop - part.start))
            logits, entries = decode(params, text[:, part], order, entries)
            parts.append(logits)
        found.append(np.concatenate(parts, 1))
    # float32, the same sums over keys in another order.
    np.testing.assert_allclose(found[0], whole, rtol=0, atol=1e-4 * np.ptp(whole))
    # Positions behind a row's own add exact zeros, however many there are.
    np.testing.assert_array_equal(found[0][:, :12], found[1][:, :12])
