"""Every shipped config has a plan on every kind of hardware in the catalogue, whatever the number of devices."""

from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.config import load_config
from jaxtrain.metrics.format import differing_gib
from jaxtrain.plan.catalogue.hardware import catalogue, parse_targets
from jaxtrain.plan.catalogue.here import nominal_cpu
from jaxtrain.plan.report.rows import answer_lines
from jaxtrain.plan.search.make import fitted_plan

CONFIGS = {
    path.stem: load_config(path.stem, weights=False).config
    for path in (Path(jaxtrain.__file__).parent / "configs").glob("*")
}
# A pipeline's, a ResNet's, an adapter's and a small one: the others are further rows of the same claim.
FIRST = ("llama3_8b", "resnet50_imagenet", "llama3.1_8b_lora", "quickstart")
COUNTS = [
    *(pytest.param(kind, (1, 8), FIRST, id=f"{kind} few") for kind in catalogue()),
    pytest.param("h100", (1024,), FIRST, id="h100 many"),
    *(
        pytest.param(kind, (1, 2, 4, 8, 16, 64, 1024), CONFIGS, id=f"{kind} all", marks=pytest.mark.long)
        for kind in ("rtx4090", "h100", "v5e")
    ),
]


@pytest.mark.parametrize(("kind", "counts", "names"), COUNTS)
def test_there_is_a_plan(kind, counts, names):
    known = catalogue()
    for count in counts:
        hardware = known | {"cpu": nominal_cpu(count)}
        (target,) = parse_targets(f"{kind}x{count}", hardware)
        for name in names:
            config = CONFIGS[name]
            plan = fitted_plan(config, target)
            lines = answer_lines(plan)
            # It says either that it fits or what would; no rows are lost or made where a layout takes the batch.
            assert (" fits: " in lines[0]) or ("; to change: " in lines[0]) or "not known" in lines[0], (name, lines)
            assert len(lines) == (3 if plan.fitted is None else 4)
            rows = plan.config.train.global_batch_size * plan.config.train.steps
            wanted = config.train.global_batch_size * config.train.steps
            assert abs(rows - wanted) < plan.config.train.global_batch_size, (name, target.name)


def test_sizes_are_shown_with_the_digits_that_differ():
    assert differing_gib(15.7504 * 2**30, 15.75 * 2**30) == ("15.7504 GiB", "15.7500 GiB")
    assert differing_gib(139.1 * 2**30, 72.8 * 2**30) == ("139.10 GiB", "72.80 GiB")
