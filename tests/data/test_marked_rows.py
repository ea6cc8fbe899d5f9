"""Rows of one text each say what is padding where the model has to know: its experts count tokens, longrope lengths."""

import json

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config.padding import marks_padding
from jaxtrain.plan.compilers.exact import batch_shapes
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.train.assemble import open_run_data

LENGTH = 64
SIZES = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": LENGTH}
EXPERTS = {"experts": {"num_experts": 2, "experts_per_token": 1}}
ROPE = {"rope_scaling": {"kind": "longrope", "short_factors": [1.0, 1.0], "long_factors": [2.0, 2.0]}}
CHAT = {"kind": "chat", "tokenizer": {"kind": "byte"}, "packing": False, "template": "plain"}
# id: model, data (None: rows of documents), task, and whether rows are marked.
ROWS = {
    "experts, chats": (EXPERTS, CHAT, "language_modeling", True),
    "experts, documents": (EXPERTS, None, "language_modeling", True),
    "longrope, chats": ({"rope_scaling": {**ROPE["rope_scaling"], "original_length": 32}}, CHAT, None, True),
    "longrope, pairs": ({"rope_scaling": {**ROPE["rope_scaling"], "original_length": 32}}, CHAT, "dpo", True),
    "longrope, short rows": ({"rope_scaling": {**ROPE["rope_scaling"], "original_length": LENGTH}}, CHAT, None, False),
    "experts, pairs": (EXPERTS, CHAT, "dpo", False),
    "dense": ({}, CHAT, None, False),
    "packed": (EXPERTS, {**CHAT, "packing": True}, None, False),
}


@pytest.mark.parametrize(("model", "data", "task", "marked"), ROWS.values(), ids=ROWS)
def test_rows_are_those_that_the_plan_has(tmp_path, model, data, task, marked):
    if data is None:
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 9)))
        data = {"kind": "documents", "path": str(path), "rows": "document", "tokenizer": {"kind": "byte"}}
    group = {"model": {**SIZES, **model}, "data": data, "train": {"global_batch_size": 2}}
    config = jt.load_config({**group, "task": task or "language_modeling"}).config
    assert marks_padding(config) == marked
    rows = open_run_data(config).train.gather(np.arange(2))
    found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), {name: rows[name] for name in ("inputs", "weights")})
    planned = batch_shapes(describe_workload(config))
    assert found == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), {name: planned[name] for name in found})
    if marked:
        real = rows["inputs"]["segments"] != 0
        assert not np.any(rows["weights"][~real])
        assert np.all(np.diff(rows["inputs"]["segments"], axis=-1) <= 0)
        assert real.any()
    elif data.get("packing") is False:
        assert not isinstance(rows["inputs"], dict)
