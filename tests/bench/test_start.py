"""The time to the first step: what a warm start saves, and that deeper models make no longer programs.

`jaxtrain bench` measures the times; here is what they follow from. No time is asserted.
"""

import math

import pytest

from jaxtrain.bench.measure import start_seconds
from jaxtrain.config import load_config
from jaxtrain.plan.compile import batch_shapes
from jaxtrain.plan.workload import describe_workload
from jaxtrain.train.build import build_step

TINY = ["model.num_layers=1", "model.embed_dim=16", "model.num_heads=2", "model.max_sequence_length=16"]
TINY_RUN = [*TINY, "train.global_batch_size=8", "data.kind=synthetic", "data.num_rows=64", "train.steps=5"]


@pytest.mark.long
def test_a_warm_start_reads_what_the_cold_one_compiled(tmp_path):
    words = [*TINY_RUN, "compilation_cache=null"]
    cold, warm = (start_seconds("bench_cpu", words, tmp_path, emulate=1) for _ in range(2))
    assert any("cached next time" in line for line in cold[1])
    assert any("from cache" in line for line in warm[1])
    for seconds, _ in (cold, warm):
        assert seconds > 0
        assert math.isfinite(seconds)


def test_a_deeper_model_is_no_longer_a_program():
    """Layers are a loop over their stacked parameters, so that 48 compile as fast as 6."""
    lengths = []
    for num_layers in (6, 48):
        overrides = [*TINY[1:], f"model.num_layers={num_layers}", "train.global_batch_size=8", "parallel.data=8"]
        config = load_config("bench_cpu", overrides=overrides).config
        work = describe_workload(config)
        step = build_step(config, input_shape=work.input_shape, vocab_size=work.vocab_size, num_outputs=None)
        lengths.append(len(step.lower(batch_shapes(work)).as_text().splitlines()))
    assert lengths[0] == lengths[1]
