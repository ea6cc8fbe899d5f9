"""Each form of the transformer's block, with the settings that its families combine, gives one device's numbers."""

from typing import Any

import chex
import numpy as np
import pytest
from layouts import ADAMW, CASES, Case, distance, layout, reference, run, transformer

from jaxtrain.config.data import TextData
from jaxtrain.models.tasks import language_modeling

# As in test_layouts.py, with the reasons there.
TOLERANCE = 1e-5

# name -> settings of the block; four layers, and a window of 7 of 32 positions.
FORMS: dict[str, dict[str, Any]] = {
    "sandwich": dict(
        block="sandwich", norm_offset=True, activation="geglu", qk_norm=True, attention_scale=0.4, embedding_scale=5.6,
        attention_softcap=5.0, logits_softcap=3.0, tie_embeddings=True,
        local_layers=dict(pattern=(1, 0, 1), window=7, rope_theta=100.0),
    ),
    "parallel": dict(
        block="parallel", norm="layernorm", bias=True, activation="gelu_exact", rotary_fraction=0.5, dropout=0.1,
        rope_scaling=dict(kind="yarn", factor=4.0, original_length=16),
    ),
    "post": dict(
        block="post", norm="layernorm", bias=True, activation="gelu_exact", position="learned", position_offset=2,
        embedding_norm=True, token_types=2, num_kv_heads=8, logits_scale=0.5,
    ),
    "relative": dict(position="relative", activation="relu", attention_scale=1.0, bias="qkv"),
}  # fmt: skip
for name, options in FORMS.items():
    make = lambda remat, options=options: transformer(remat, num_layers=4, **options)  # noqa: E731
    CASES[name] = Case(make, language_modeling(), TextData(), 32, ADAMW, 1.0)

LAYOUTS = {
    "fsdp=2,tensor=2": layout(fsdp=2, tensor=2),
    "data=2,zero=2": layout(data=2, zero=2),
    "pipe=2,tensor=2": layout(pipe=2, tensor=2),
    "context=2,data=2": layout(context=2, data=2),
    "pipe=2,context=2": layout(pipe=2, context=2),
}
WITHOUT_REMAT = ("data=2,zero=2", "context=2,data=2", "pipe=2,context=2")
# The branch of local layers meets every axis; of the other forms, what shards their parameters and splits their stack.
ROWS = {
    "sandwich": [("fsdp=2,tensor=2", "dots"), *((row, "none") for row in WITHOUT_REMAT)],
    "parallel": [("fsdp=2,tensor=2", "dots"), ("pipe=2,tensor=2", "full")],
    "post": [("fsdp=2,tensor=2", "dots"), ("pipe=2,tensor=2", "full"), ("context=2,data=2", "none")],
    "relative": [("fsdp=2,tensor=2", "dots"), ("pipe=2,tensor=2", "full"), ("data=2,zero=2", "none")],
}
# In plain pytest test_layouts.py proves layouts, and tests/models/test_block_settings.py what these settings compute.


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "row", "remat"), [(form, row, remat) for form, rows in ROWS.items() for row, remat in rows]
)
def test_layouts_give_the_numbers_of_one_device(form: str, row: str, remat: str) -> None:
    alone = reference(form, 4)
    outcome = run(form, LAYOUTS[row], 4, remat, start=alone.state)
    chex.assert_trees_all_equal(outcome.state.params, alone.state.params)
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=TOLERANCE)
    assert distance(outcome.params, alone.params) < TOLERANCE
    assert alone.losses[-3:].mean() < alone.losses[:3].mean(), "a run that learns nothing would prove nothing"
