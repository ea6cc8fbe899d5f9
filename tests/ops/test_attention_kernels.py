"""Every implementation of attention on one table of cases against the plain formula: forward and gradients."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, use_layout
from jaxtrain.ops.attention.blockwise import blockwise_attention, parts_of_batch
from jaxtrain.ops.attention.reference import reference_attention
from jaxtrain.ops.attention.rules import CAUSAL, AttentionForm
from jaxtrain.ops.attention.table import cudnn_attention, refusal, self_attention, splash_attention
from jaxtrain.runtime.compiler import record_choices

HEADS, HEAD_DIM = 4, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """What is attended: who sees whom, key-value heads (of 4), packed or not, dtype, length."""

    form: AttentionForm = CAUSAL
    groups: int = 4
    packed: bool = False
    dtype: str = "float32"
    length: int = 128
    rows: int = 2


CASES = {
    "causal": Case(),
    "full": Case(AttentionForm(causal=False)),
    "window": Case(AttentionForm(window=20)),
    "window, full": Case(AttentionForm(causal=False, window=9)),
    "packed, full": Case(AttentionForm(causal=False), packed=True),
    "one key-value head, packed": Case(groups=1, packed=True),
    "window, grouped": Case(AttentionForm(window=20), groups=2),
    "softcap, window, packed, grouped": Case(AttentionForm(window=33, softcap=5.0), groups=2, packed=True),
    "bf16, softcap": Case(AttentionForm(softcap=2.0), dtype="bfloat16"),
    "a length that no block divides": Case(AttentionForm(window=40), length=100, packed=True),
}


def inputs(case):
    rng = np.random.default_rng(1)
    shapes = [(case.rows, case.length, heads, HEAD_DIM) for heads in (HEADS, case.groups, case.groups)]
    # Scores of a few units, so that the softmax is neither flat nor one key.
    q, k, v = (jnp.asarray(rng.normal(size=shape), case.dtype) for shape in shapes)
    lengths = [(30, 50, case.length - 80), (case.length - 1, 1)] * (case.rows // 2)
    segments = np.stack([np.repeat(np.arange(len(row)), row) for row in lengths])
    return q, k, v, jnp.asarray(segments, jnp.int32) if case.packed else None


def outputs_and_gradients(attend, case):
    q, k, v, segments = inputs(case)

    def loss(q, k, v):
        out = attend(q, k, v, segments, case.form)
        weights = jnp.cos(jnp.arange(out[0].size, dtype=jnp.float32)).reshape(out.shape[1:])
        return jnp.sum(out.astype(jnp.float32) * weights), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


@functools.cache
def expected(case):
    return outputs_and_gradients(reference_attention, case)


# A few roundings of 6e-8 of the largest value in sums of 128; in bf16 one of 4e-3 of the weights and one of the result.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}


def assert_same(found, case):
    for name, value in expected(case).items():
        one, other = (np.asarray(x, np.float64) for x in (found[name], value))
        assert found[name].dtype == value.dtype
        limit = TOLERANCE[case.dtype] * max(np.abs(other).max(), 1)
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=name)


# Blocks of 32 make 4 groups of one block at 128 positions; 8 make groups of two, in a loop; 48 leave a rest.
BLOCKS = {
    ("one key-value head, packed", 32): (),
    ("packed, full", 48): (),
    ("softcap, window, packed, grouped", 8): (),
    ("a length that no block divides", 16): (),
    ("bf16, softcap", 48): (),
    ("window, full", 16): pytest.mark.long,
}


@pytest.mark.parametrize(("case", "block"), [pytest.param(*row, marks=marks) for row, marks in BLOCKS.items()])
def test_blockwise(case, block):
    case = CASES[case]
    assert_same(outputs_and_gradients(functools.partial(blockwise_attention, block=block), case), case)


def test_parts_of_the_rows_give_the_numbers_of_all_at_once(monkeypatch):
    case, found = dataclasses.replace(CASES["packed, full"], rows=4, groups=2), []
    for parts in (1, 2):
        monkeypatch.setattr("jaxtrain.ops.attention.blockwise.parts_of_batch", lambda *_, parts=parts: parts)
        found.append(outputs_and_gradients(functools.partial(blockwise_attention, block=48), case))
    chex.assert_trees_all_equal(*found)


def test_only_a_single_cpu_device_takes_rows_one_after_the_other(monkeypatch):
    monkeypatch.setattr("jaxtrain.ops.attention.blockwise.usable_cores", lambda: 2)
    q = jax.ShapeDtypeStruct((16, 256, 6, 64), jnp.float32)  # 128 x 256 scores of 6 heads take 768 KiB a row
    for count, parts in ((1, 8), (8, 1)):
        with use_layout(Layout(make_mesh(devices=jax.devices()[:count]))):
            assert parts_of_batch(q, CAUSAL, 128) == parts


# What the kernel is given of a form: its mask, the segments, the cap and the groups.
SPLASH = ("packed, full", "window, full", "softcap, window, packed, grouped", "bf16, softcap")


@pytest.mark.long
@pytest.mark.parametrize("case", SPLASH)
def test_splash(case):
    """The kernel's own steps, as plain operations; a head dim of 64 is scaled by a power of two."""
    case = CASES[case]
    assert_same(outputs_and_gradients(functools.partial(splash_attention, interpret=True), case), case)


def test_cudnn_refuses_what_it_cannot_compute(monkeypatch):
    monkeypatch.setattr("jaxtrain.ops.attention.table.current_layout", lambda: _gpu())
    monkeypatch.setattr("jaxtrain.ops.attention.table.importlib.util.find_spec", lambda name: object())
    for name, case in CASES.items():
        q, k, _, segments = inputs(dataclasses.replace(case, dtype="bfloat16"))
        two_sided = case.form.window is not None and not case.form.causal
        refused = refusal("cudnn", q, k, segments, case.form) is not None
        assert refused == (case.packed or case.form.softcap is not None or two_sided), name


@pytest.mark.parametrize("name", ["full", "window, grouped"])
def test_cudnn_is_asked_for_what_the_form_says(name, monkeypatch):
    """With XLA's attention in the kernel's place: what is passed on means the same."""
    in_xla, case = jax.nn.dot_product_attention, CASES[name]
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: in_xla(*a, **k | {"implementation": "xla"}))
    assert_same(outputs_and_gradients(lambda q, k, v, _, form: cudnn_attention(q, k, v, form), case), case)


def _gpu():
    from types import SimpleNamespace

    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    rules = {"batch": (), "sequence": (), "activation_heads": (), "activation_kv_heads": ()}
    mesh = SimpleNamespace(devices=np.array([device]), shape={}, size=1)
    return SimpleNamespace(mesh=mesh, rules=rules, degree=lambda axis: 1)


def temporaries(attend, length):
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, None, AttentionForm(causal=False)) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_blocks_grows_as_the_sequence():
    """That of the formula grows as its square."""
    blockwise = [temporaries(blockwise_attention, length) for length in (1024, 2048)]
    assert blockwise[1] / blockwise[0] < 2.3  # twice, and what does not grow
    assert blockwise[1] < temporaries(reference_attention, 2048) / 4


def chosen(case, **options):
    q, k, v, segments = inputs(case)
    with record_choices() as notes:
        jax.eval_shape(functools.partial(self_attention, form=case.form, **options), q, k, v, segments)
    return notes


def test_the_choice_is_told_once_with_its_reasons():
    assert chosen(Case()) == ["attention: blockwise"]
    assert chosen(Case(), implementation="reference") == ["attention: reference"]
    q = jnp.zeros((1, 32, 4, 64))
    with record_choices() as notes:
        for _ in range(2):
            jax.eval_shape(self_attention, q, q, q)
    assert notes == ["attention: reference, not blockwise (the sequence is one block of 64)"]
    with pytest.raises(ConfigError, match=r"model\.attention=cudnn cannot run: the platform is cpu; use"):
        chosen(Case(), implementation="cudnn")
    with pytest.raises(ConfigError, match=r"unknown model\.attention='flash'; known: auto, cudnn, splash"):
        chosen(Case(), implementation="flash")
