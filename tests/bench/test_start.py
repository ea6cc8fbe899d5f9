"""The time to the first step: what a warm start saves, and that deeper models make no longer programs.

`scripts/bench_start.py` measures the times; here is what they follow from. No time is asserted.
"""

import math

import pytest

from jaxtrain.bench import measure
from jaxtrain.bench.measure import NoStepError, start_seconds
from jaxtrain.config import load_config
from jaxtrain.config.schema import LoggingConfig
from jaxtrain.plan.compile import batch_shapes
from jaxtrain.plan.workload import describe_workload
from jaxtrain.train.assemble import build_step

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


# Settings that write outside of the directory of the run, or ask a service.
LOUD = [
    *(f"logging.{name}=true" for name, field in LoggingConfig.model_fields.items() if field.annotation is bool),
    *("checkpoint.directory=gs://b/c", "checkpoint.mirror=gs://b/d", "checkpoint.every_minutes=0.01"),
    *("profile.start_step=1", "compilation_cache=/mine"),
]


def test_a_timed_start_leaves_nothing_but_its_folder(tmp_path, monkeypatch):
    """Nor ghost runs in a tracker, nor a store that belongs to a run which is over."""
    commands = []

    class Run:
        returncode = 0

        def __init__(self, command, **_):
            commands.append(command)

        def poll(self):
            return 0

        def kill(self):
            pass

        def wait(self):
            pass

    monkeypatch.setattr(measure.subprocess, "Popen", Run)
    with pytest.raises(NoStepError, match="it ended with 0"):
        start_seconds("digits_mlp", LOUD, tmp_path / "a cache")
    words = commands[0][commands[0].index("digits_mlp") + 1 : commands[0].index("--run-dir")]
    config = load_config("digits_mlp", overrides=words).config
    assert [name for name, value in config.logging if value is True] == []
    assert (config.checkpoint.directory, config.checkpoint.mirror, config.checkpoint.every) == (None, None, None)
    assert config.checkpoint.every_minutes is None
    assert config.profile.start_step is None
    assert config.compilation_cache == str(tmp_path / "a cache")


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
