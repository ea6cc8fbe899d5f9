"""The search over layouts, the largest batch, advice for what does not fit, `parallel: auto`; a plan for everybody."""

import itertools
import re
from pathlib import Path

import jax
import pytest

import jaxtrain
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.compile import sharded_bytes
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.hardware import catalogue, find
from jaxtrain.plan.plans import advise, fitted_plan
from jaxtrain.plan.search import VARIED, chosen, describe_layout, largest_batch, layouts, search, why_not
from jaxtrain.plan.show import answer_lines
from jaxtrain.plan.step import with_degrees
from jaxtrain.plan.targets import nominal_cpu, parse_targets, target_of
from jaxtrain.plan.workload import describe_workload
from jaxtrain.run.run import run_config
from jaxtrain.train.assemble import build_step

H100X8 = target_of(find("h100"), 8)
SMALL = (
    *("data.tokenizer.kind=byte", "train.global_batch_size=32"),
    *("model.num_layers=4", "model.embed_dim=32", "model.num_heads=4", "model.mlp_dim=64"),
)


def config_of(name, *overrides):
    return load_config(name, overrides=overrides, weights=False).config


def test_a_search_ranks_what_fits_the_fastest_first():
    """The search that `jaxtrain plan llama3_8b --on h100x8 --search` makes: of 200 layouts and more."""
    config = config_of("llama3_8b")
    found = search(config, H100X8)
    candidates = list(layouts(config, 8, VARIED))
    assert found.tried == len(candidates) >= 200
    assert len({candidate.model_dump_json() for candidate in candidates}) == len(candidates)
    assert found.ranked
    assert found.too_large
    assert all(one.fits and one.memory.fits for one in found.ranked)
    assert not any(one.fits for one in found.too_large)
    seconds = [one.time.seconds for one in found.ranked]
    assert seconds == sorted(seconds)
    sizes = [one.memory.total_bytes for one in found.too_large]
    assert sizes == sorted(sizes)
    for one in (*found.ranked, *found.too_large):
        assert one.config.train.global_batch_size == 64
        assert one.config.optimizer == config.optimizer
    memory, _, *refused = why_not(found)
    assert memory.startswith(f"{len(found.too_large)} layouts need more memory than the ")
    assert describe_layout(found.too_large[0].config) in memory
    assert sum(int(line.split()[0]) for line in refused) == len(found.refused)
    assert all(line.partition(" refused: ")[2] for line in refused)


# id: (config, overrides, reason of one refused layout)
REFUSALS = {
    "heads": (
        "quickstart",
        [],
        r"heads of blocks/attention/query/kernel is 4, which does not divide by tensor=8; make",
    ),
    "sequence": (
        *("quickstart", ["model.max_sequence_length=8190"]),
        r"data\.sequence_length=8190 does not divide by 2 x parallel.context=2 .*; make it 8188 or 8192",
    ),
    "stages of a task": ("smollm2_dpo", ["parallel.data=auto"], "the loss of task 'dpo' calls the model itself"),
}


@pytest.mark.parametrize(("name", "overrides", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_refused_layouts_say_why(name, overrides, pattern):
    found = search(config_of(name, *overrides), H100X8, vary=("mesh",))
    assert any(re.search(pattern, reason) for reason in found.refused), set(found.refused)


def test_varies_what_is_asked_for_and_nothing_else():
    config = config_of("llama3_8b")
    found = search(config, H100X8, vary=("remat", "optimizer", "precision"))
    assert found.tried == 3 * 3 * 2
    configs = [one.config for one in (*found.ranked, *found.too_large)]
    assert {one.optimizer.kind for one in configs} == {"adamw", "lion", "adafactor"}
    assert {one.precision.policy for one in configs} == {"bf16", "bf16_pure"}
    # A line tells one from another.
    assert len({describe_layout(one, found.vary) for one in configs}) == len(configs)
    # What all kinds of optimizer have goes along.
    assert {one.optimizer.learning_rate for one in configs} == {3e-4}
    assert {(one.parallel.fsdp, one.train.accumulation_steps) for one in configs} == {(8, 8)}
    with pytest.raises(ConfigError, match=r"^cannot search over 'colour'; known: mesh, zero, remat"):
        search(config, H100X8, vary=("mesh", "colour"))


@pytest.mark.long
def test_a_layout_is_refused_by_the_planner_where_the_trainer_refuses_it():
    """Every mesh and schedule on 4 devices: the step can be built just where the plan says so, with its bytes."""
    config = config_of("quickstart", *SMALL, "model.max_sequence_length=4096", "model.num_heads=2")
    kinds = {"taken": 0, "refused": 0}
    for candidate in layouts(config, 4, ("mesh", "schedule")):
        try:
            predicted = analyse(candidate, target_of(find("h100"), 4)).memory.state_bytes
        except ConfigError:
            predicted = None
        workload = describe_workload(candidate)
        sizes = dict(input_shape=workload.input_shape, vocab_size=workload.vocab_size)
        try:
            step = build_step(with_degrees(candidate, 4), **sizes, devices=jax.devices()[:4])
        except ConfigError:
            assert predicted is None, describe_layout(candidate)
            kinds["refused"] += 1
        else:
            assert predicted is not None, describe_layout(candidate)
            assert predicted == pytest.approx(sharded_bytes(step.abstract_state), rel=0.01), describe_layout(candidate)
            kinds["taken"] += 1
    assert min(kinds.values()) > 0


# id: (overrides, rows that a layout takes at the least, the most rows that fit, the answer)
BATCHES = {
    "any": (["parallel.fsdp=8"], 8, 100, 96),
    "one less": (["parallel.fsdp=8"], 8, 95, 88),
    "none": (["parallel.fsdp=8"], 8, 7, None),
    "accumulation": (["parallel.data=4", "parallel.tensor=2", "train.accumulation_steps=4"], 16, 1000, 992),
    "pipeline with its microbatches": (["parallel.pipe=2", "parallel.data=4", "parallel.microbatches=8"], 32, 70, 64),
    # The trainer takes a pipeline's microbatches from accumulation where none are set.
    "pipeline with accumulation": (["parallel.pipe=2", "parallel.data=4", "train.accumulation_steps=8"], 32, 70, 64),
}


@pytest.mark.parametrize(("overrides", "least", "most", "answer"), BATCHES.values(), ids=BATCHES)
def test_largest_batch(overrides, least, most, answer):
    asked = []

    def fits(config):
        rows = config.train.global_batch_size
        asked.append(rows)
        # What is asked can be laid out: no ConfigError.
        analyse(config, H100X8)
        return rows <= most

    config = with_degrees(config_of("quickstart", *SMALL, *overrides), 8)
    assert largest_batch(config, fits) == answer
    assert asked[0] == least
    assert all(rows % least == 0 for rows in asked)
    # No question twice, and no more than doubling and bisecting need: each is a compile.
    assert len(asked) == len(set(asked)) <= 2 + 2 * max(1, most // least).bit_length()


def test_the_largest_batch_of_the_analytic_model_fits_and_the_next_does_not():
    config = with_degrees(config_of("llama3_8b", "train.accumulation_steps=1"), 8)

    def fits(one):
        return analyse(one, H100X8).memory.fits

    rows = largest_batch(config, fits)
    train = config.train
    assert rows is not None
    assert fits(config.model_copy(update={"train": train.model_copy(update={"global_batch_size": rows})}))
    assert not fits(config.model_copy(update={"train": train.model_copy(update={"global_batch_size": rows + 8})}))


# id: (config, target, overrides, what the first line begins with)
DO_NOT_FIT = {
    "no remat": ("llama3_8b", "h100x8", ["remat.policy=none"], "remat.policy=dots: "),
    "large microbatches": ("llama3_8b", "a100-40x8", ["train.accumulation_steps=1"], "train.accumulation_steps=2: "),
    "two changes": (
        *("llama3_8b", "a100-40x8", ["remat.policy=dots", "train.accumulation_steps=1"]),
        "remat.policy=full and train.accumulation_steps=2: ",
    ),
    "adapters": ("llama3.1_8b_lora", "t4", [], "finetune.base="),
    # A microbatch keeps its rows on each device: 8 rows in 8 microbatches of one are 2 of 4.
    "more devices": (
        *("llama3_8b", "h100"),
        ["parallel.fsdp=1", "train.global_batch_size=8", "model.size=llama2_13b", "model.max_sequence_length=8192"],
        "h100x4 with parallel.fsdp=4 and train.accumulation_steps=2: ",
    ),
}


def applied(line, name, overrides, target):
    """The plan of what a user types who follows a line of advice."""
    changes = re.sub(r" \([^)]*\)", "", line).partition(": ")[0]
    on, given, changes = changes.rpartition(" with ")
    words = changes.split(" and ")
    assert all(re.fullmatch(r"[a-z0-9_.]+=[a-z0-9_]+", word) for word in words), line
    return analyse(config_of(name, *overrides, *words), parse_targets(on if given else target)[0])


@pytest.mark.parametrize(("name", "target", "overrides", "expected"), DO_NOT_FIT.values(), ids=DO_NOT_FIT)
def test_advice_fits_when_it_is_followed(name, target, overrides, expected):
    estimate = analyse(config_of(name, *overrides), parse_targets(target)[0])
    assert estimate.fits is False
    lines = advise(estimate)
    assert 1 <= len(lines) <= 4
    # Neither a line twice, nor the same two changes in both orders.
    assert len({frozenset(line.partition(": ")[0].split(" and ")) for line in lines}) == len(lines)
    assert lines[0].startswith(expected)
    for line in lines:
        after = applied(line, name, overrides, target)
        assert after.fits, line
        assert f": {after.memory.total_bytes / 2**30:.1f} GiB" in line


def test_auto_takes_the_place_of_the_degrees_of_a_shipped_config():
    loaded = load_config("llama3_8b", overrides=["parallel=auto"])
    assert [re.sub(r":\d+", "", note) for note in loaded.notes] == [
        "parallel.data (llama3_8b.yaml) gave way to parallel=auto (command line)",
        "parallel.fsdp (llama3_8b.yaml) gave way to parallel=auto (command line)",
    ]
    config, _ = chosen(loaded.config, H100X8)
    assert with_degrees(config, 8) == config


def test_auto_and_a_degree_are_a_mistake():
    with pytest.raises(ConfigError, match=r"auto chooses every degree, but parallel\.fsdp is set; leave one"):
        chosen(config_of("quickstart", "parallel=auto", "parallel.fsdp=2"), H100X8)


def test_auto_picks_the_fastest_that_fits_and_says_why():
    asked = config_of("llama3_8b", "parallel=auto")
    config, reasons = chosen(asked, H100X8)
    found = search(asked, H100X8, vary=("mesh", "zero", "schedule"))
    best = found.ranked[0]
    assert not config.parallel.auto
    # Degrees as numbers, and nothing but the layout is chosen.
    assert analyse(config, H100X8).time.seconds == best.time.seconds == min(one.time.seconds for one in found.ranked)
    assert config.model_copy(update={"parallel": asked.parallel}) == asked
    assert reasons[0].startswith(
        f"parallel.auto chose {describe_layout(config)} out of {found.tried} layouts for h100x8"
    )
    assert any("need more memory" in line for line in reasons) == bool(found.too_large)


@pytest.mark.long
def test_a_run_with_auto_trains_and_its_banner_names_the_layout(tmp_path, capsys):
    # The devices are the 8 that this process emulates; the CPU is measured first, in some seconds.
    overrides = ["parallel=auto", *SMALL, "model.max_sequence_length=32", "optimizer.schedule.warmup_steps=1"]
    overrides += ["train.steps=2", "evaluation.max_batches=1", "evaluation.sample_prompt=null", "logging.report=false"]
    loaded = load_config("quickstart", overrides=[*overrides, "logging.tensorboard=false"])
    result = run_config(loaded, run_dir=tmp_path / "run")
    assert result.state.step == 2
    said = " ".join(capsys.readouterr().err.split())
    layout = re.search(r"parallel\.auto chose (.*?), remat=dots.* out of \d+ layouts for cpux8: predicted", said)
    assert layout, said
    degrees = dict(word.split("=") for word in layout[1].split(", "))
    mesh = result.state.params["embedding"].sharding.mesh
    assert {axis: str(size) for axis, size in mesh.shape.items() if size > 1} == degrees


# id: (config, target, overrides): values that no list of the search has.
OWN = {
    "remat": (
        *("gpt2_124m", "rtx4090"),
        ["remat.policy=sqrt", "train.global_batch_size=96", "train.accumulation_steps=12"],
    ),
    "zero 3": ("gpt2_124m", "h100x8", ["parallel.zero=3"]),
    "schedule": (
        *("gpt2_124m", "h100x4"),
        ["parallel.schedule=gpipe", "parallel.pipe=4", "parallel.microbatches=12", "train.global_batch_size=96"],
    ),
}


@pytest.mark.parametrize(("name", "on", "overrides"), OWN.values(), ids=OWN)
def test_a_search_tries_the_config_as_it_is(name, on, overrides):
    config, (target,) = config_of(name, *overrides, "train.accumulation_steps=1"), parse_targets(on)
    tried = list(layouts(config, target.num_devices, VARIED))
    own, found = analyse(config, target), analyse(tried[0], target)
    # On a mesh that the search chose, stage 3 is its axis `fsdp`.
    assert (found.degrees, found.memory, found.time) == (own.degrees, own.memory, own.time)


CONFIGS = [path.stem for path in (Path(jaxtrain.__file__).parent / "configs").glob("*")]
# id: (kinds of hardware, numbers of devices, configs)
ANSWERS = {
    "every hardware": (list(catalogue()), (8,), ["quickstart"]),
    "a pipeline, a ResNet, adapters": (
        ["rtx4090", "v5e"],
        (8,),
        ["llama3_8b", "resnet50_imagenet", "llama3.1_8b_lora"],
    ),
    "more devices than rows": (["h100"], (1024,), ["quickstart"]),
    "one card": (["rtx4090"], (1, 4, 64), CONFIGS),
    "slices": (["v5e"], (8, 1024), CONFIGS),
}
LONG = ("one card", "slices")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.long] * (row in LONG)) for row in ANSWERS])
def test_every_config_has_a_plan_on_every_hardware(row):
    kinds, counts, names = ANSWERS[row]
    for kind, count in itertools.product(kinds, counts):
        (target,) = parse_targets(f"{kind}x{count}", catalogue() | {"cpu": nominal_cpu(count)})
        for name in names:
            config = config_of(name)
            plan = fitted_plan(config, target)
            lines = answer_lines(plan)
            # It says either that it fits or what would; no rows are lost or made where a layout takes the batch.
            assert (" fits: " in lines[0]) or ("; to change: " in lines[0]) or "not known" in lines[0], (name, lines)
            assert len(lines) == (3 if plan.fitted is None else 4)
            rows = plan.config.train.global_batch_size * plan.config.train.steps
            wanted = config.train.global_batch_size * config.train.steps
            assert abs(rows - wanted) < plan.config.train.global_batch_size, (name, target.name)
