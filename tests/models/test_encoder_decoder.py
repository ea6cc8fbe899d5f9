"""The encoder-decoder: what each position sees, generation with its cache, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.prompts import encode_prompts
from jaxtrain.inference.sampling import Sampling
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.train.build import shard_model

_SMALL = dict(
    kind="encoder_decoder", num_layers=1, num_decoder_layers=2, embed_dim=8, num_heads=2, mlp_dim=16,
    relative_buckets=8, relative_max_distance=6, max_sequence_length=24, attention_scale=1.0,
)  # fmt: skip


@functools.cache
def _model() -> tuple[Model, dict]:
    """A model whose norms, tables and kernels are all large enough to show in the logits."""
    model = build_model(_SMALL, input_shape=(10,), vocab_size=258)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: rng.normal(0.2, 0.3, x.shape).astype(np.float32), shapes)


@functools.cache
def _applied():
    model, params = _model()
    return jax.jit(lambda inputs: model.apply(params, {}, inputs, key=None, train=False)[0])


def _tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 258, shape, dtype=np.int32)


def _assert_close(found: jax.Array, wanted: jax.Array) -> None:
    """Tolerances: sums of float32 in another order."""
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_tied_embeddings_start_without_a_guess():
    """Tied embeddings of variance 1 may not name the decoder's own input as the next token."""
    settings = dict(kind="encoder_decoder", num_layers=4, embed_dim=256, num_heads=4, attention_scale=1.0)
    settings |= dict(tie_embeddings=True, logits_scale=256**-0.5, max_sequence_length=24)
    model = build_model(settings, input_shape=(10,), vocab_size=1000)
    params = jax.jit(model.init)(jax.random.key(0))[0]
    inputs, targets = {"tokens": _tokens(0, 4, 10), "decoder_tokens": _tokens(1, 4, 20)}, _tokens(2, 4, 20)
    logits = jax.jit(lambda params: model.apply(params, {}, inputs, key=None, train=False)[0])(params)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()
    # Logits of variance 1 give ln V + 1/2, and what is left of the own token a little more: with blocks whose outputs
    # are small beside the embeddings it would be 10 above.
    assert abs(loss - np.log(1000)) < 1.2


def test_what_each_position_sees():
    """Rows of one batch: two packed documents, each of them alone, and one alone with other tokens as its padding."""
    tokens, output = _tokens(0, 4, 10), _tokens(1, 4, 6)
    tokens[1, :4], output[1, :4] = tokens[0, :4], output[0, :4]
    tokens[2, :6], output[2, :2] = tokens[0, 4:], output[0, 4:]
    tokens[3, :6], output[3, :2] = tokens[0, 4:], output[0, 4:]
    logits = _applied()(
        {
            "tokens": tokens,
            "segments": np.array([[1] * 4 + [2] * 6, [1] * 4 + [0] * 6, *[[1] * 6 + [0] * 4] * 2], np.int32),
            "decoder_tokens": output,
            "decoder_segments": np.array([[1] * 4 + [2] * 2, *[[1] * 6] * 3], np.int32),
        }
    )
    _assert_close(logits[0, :4], logits[1, :4])
    _assert_close(logits[0, 4:], logits[2, :2])
    np.testing.assert_array_equal(logits[2, :2], logits[3, :2])
    # An output sees no token behind it, and the whole input.
    assert not np.array_equal(logits[2, 2:], logits[3, 2:])


def test_the_cache_gives_the_logits_of_training():
    """The first three tokens at once, then one by one, over inputs of two lengths."""
    model, params = _model()
    decoder = model.decoder
    assert decoder is not None
    assert decoder.encode is not None
    tokens, output, lengths = _tokens(0, 2, 10), _tokens(1, 2, 6), np.array([10, 6], np.int32)
    seen = (np.arange(10)[None] < lengths[:, None]).astype(np.int32)
    wanted = _applied()({"tokens": tokens, "segments": seen, "decoder_tokens": output})
    encode, cache = jax.jit(decoder.encode), decoder.init_cache(2, 6, jnp.float32)
    cache = encode(params, tokens, lengths, cache)
    decode, found = jax.jit(decoder.decode), []
    for part in (slice(0, 3), *(slice(i, i + 1) for i in range(3, 6))):
        positions = np.broadcast_to(np.arange(6)[part], output[:, part].shape)
        logits, cache = decode(params, output[:, part], positions, cache)
        found.append(logits)
    _assert_close(np.concatenate(found, 1), wanted)


@pytest.mark.long
def test_greedy_outputs_are_those_of_the_likeliest_next_token():
    model, params = _model()
    tokens, lengths = _tokens(3, 2, 10), np.array([10, 5], np.int32)
    sharded = shard_model(model, mesh=make_mesh(devices=jax.devices()[:1]))
    prompts = [row[:length] for row, length in zip(np.asarray(tokens), lengths, strict=True)]
    new = generate_ids(sharded, params, prompts, new_tokens=4, sampling=Sampling(0))
    seen = (np.arange(10)[None] < lengths[:, None]).astype(np.int32)
    output = np.zeros((2, 5), np.int32)  # the start token is 0
    for place in range(4):
        logits = _applied()({"tokens": tokens, "segments": seen, "decoder_tokens": output})
        output[:, place + 1] = np.argmax(logits[:, place], axis=-1)
    np.testing.assert_array_equal(new, output[:, 1:])


def test_a_prompt_is_framed_as_the_rows_of_training_are():
    """Its end stands after it, and the output ends before the end."""
    model, _ = _model()
    encoded, ends = encode_prompts(model, ByteTokenizer(("<pad>", "</s>")), ["ab"])
    assert (encoded[0].tolist(), ends) == ([97, 98, 257], {257})
    encoded, ends = encode_prompts(model, ByteTokenizer(), ["ab"])
    assert (encoded[0].tolist(), ends) == ([97, 98], set())
