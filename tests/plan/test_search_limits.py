"""Where the search of a plan ends, and how it names a pipeline that leaves its microbatches to the trainer."""

from jaxtrain.config import load_config
from jaxtrain.plan.search.analyse import with_degrees
from jaxtrain.plan.search.layouts import describe_layout, largest_batch


def test_the_largest_batch_is_one_that_was_tried():
    config = with_degrees(load_config("quickstart", overrides=["parallel.data=8"]).config, 8)
    asked = []

    def fits(one):
        asked.append(one.train.global_batch_size)
        return True

    assert largest_batch(config, fits, most=1024) == 1024
    assert max(asked) == 1024


def test_a_pipeline_names_the_microbatches_that_it_runs():
    config = with_degrees(load_config("gpt2_124m", overrides=["parallel.data=1", "parallel.pipe=4"]).config, 4)
    assert config.parallel.microbatches is None
    assert describe_layout(config) == "pipe=4, remat=dots, 1f1b with 4 microbatches"
