"""Steps of a plan for so many tokens or epochs: of each candidate's own batch, and in the config that it gives."""

from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import find, target_of
from jaxtrain.plan.search.analyse import Terms, analyse
from jaxtrain.plan.search.layouts import search
from jaxtrain.plan.search.run_length import with_steps
from jaxtrain.plan.workload.describe import describe_workload

H100 = target_of(find("h100"), 1)

# id: (config, terms, steps)
LENGTHS = {
    # 800 rows of 128 tokens, 8 at a time.
    "tokens": ("quickstart", Terms(tokens=102_400), 100),
    "epochs": ("quickstart", Terms(epochs=2, rows_per_epoch=400), 100),
    # A row of this data is a pair, of which a batch has 4; the two answers are 2 rows of 128 tokens.
    "epochs of pairs": ("smollm2_dpo", Terms(epochs=1, rows_per_epoch=16_000), 4_000),
    "tokens of pairs": ("smollm2_dpo", Terms(tokens=2 * 4 * 128 * 50), 50),
    "as the config says": ("quickstart", Terms(), 800),
}


@pytest.mark.parametrize(("name", "terms", "steps"), LENGTHS.values(), ids=LENGTHS)
def test_steps_are_those_of_the_batch(name: str, terms: Terms, steps: int) -> None:
    estimate = analyse(load_config(name, weights=False).config, H100, terms)
    assert estimate.cost is not None
    assert estimate.cost.steps == estimate.config.train.steps == steps


def test_a_search_over_batches_gives_each_its_own_steps() -> None:
    config = load_config("quickstart").config
    ranked = search(config, H100, vary=("batch",), terms=Terms(tokens=1_024_000)).ranked
    steps = {one.config.train.global_batch_size: one.cost.steps for one in ranked if one.cost is not None}
    assert {rows: steps[rows] for rows in (8, 16, 32)} == {8: 1000, 16: 500, 32: 250}


# id: (settings of the schedule of a run of 800 steps, its warmup and decay in one of 200)
SCHEDULES = {
    "warmup": (["warmup_steps=80"], (20, None)),
    "decay that ends before the run": (["warmup_steps=80", "decay_steps=400"], (20, 100)),
    "final decay": (["kind=wsd", "warmup_steps=1", "decay_steps=799"], (1, 199)),
    "decay just above the warmup": (["warmup_steps=4", "decay_steps=5"], (1, 2)),
}


@pytest.mark.parametrize(("settings", "lengths"), SCHEDULES.values(), ids=SCHEDULES)
def test_lengths_of_a_schedule_go_with_the_steps(settings: list[str], lengths: tuple[int, int | None]) -> None:
    config = load_config("quickstart", overrides=[f"optimizer.schedule.{one}" for one in settings]).config
    schedule = with_steps(config, 200).optimizer.schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == lengths
    assert with_steps(config, 800) == config


def test_a_pair_is_two_rows_and_one_of_the_batch() -> None:
    config = load_config("smollm2_dpo", weights=False).config
    assert describe_workload(config).rows == 2 * config.train.global_batch_size


def test_a_short_run_keeps_a_step_of_its_warm_up() -> None:
    config = load_config("gpt2_124m").config
    assert with_steps(config, 13).optimizer.schedule.warmup_steps == 1
    assert with_steps(config, 1).optimizer.schedule.warmup_steps == 0


def test_the_schedule_of_a_larger_batch_follows_from_the_config_s(tmp_path: Path) -> None:
    """Scaled twice, each time rounded down, the warm-up was lost."""
    words = ["quickstart", "--on", "h100", "--analytic", "--tokens", "4e7", "model.vocab_size=2048"]
    assert (
        main(["plan", *words, "train.global_batch_size=64", "--largest-batch", "--config", str(tmp_path / "a.yaml")])
        == 0
    )
    found = load_config(tmp_path / "a.yaml").config
    size = f"train.global_batch_size={found.train.global_batch_size}"
    accumulation = f"train.accumulation_steps={found.train.accumulation_steps}"
    assert main(["plan", *words, size, accumulation, "--config", str(tmp_path / "b.yaml")]) == 0
    again = load_config(tmp_path / "b.yaml").config
    assert (again.train.steps, again.optimizer.schedule) == (found.train.steps, found.optimizer.schedule)


def test_a_tokenizer_that_learns_fewer_ids_than_asked_for_is_planned() -> None:
    words = ["data.tokenizer.vocab_size=8192", "model.vocab_size=2048"]
    workload = describe_workload(load_config("quickstart", overrides=words).config)
    assert "the tokenizer may learn up to 8,192 token ids, of which the model takes 2,048" in workload.notes
