"""The search over layouts, the largest batch, advice for what does not fit, and `parallel: auto`."""

import re
import time

import jax
import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.plan.catalogue.hardware import find, parse_targets, target_of
from jaxtrain.plan.compilers.exact import sharded_bytes
from jaxtrain.plan.search.advice import advise
from jaxtrain.plan.search.analyse import analyse, with_degrees
from jaxtrain.plan.search.auto import chosen
from jaxtrain.plan.search.layouts import VARIED, describe_layout, largest_batch, layouts, search, why_not
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.run.trainer import run_config
from jaxtrain.train.assemble import build_step

H100X8 = target_of(find("h100"), 8)
SMALL = (
    *("data.tokenizer.kind=byte", "train.global_batch_size=32"),
    *("model.num_layers=4", "model.embed_dim=32", "model.num_heads=4", "model.mlp_dim=64"),
)


def config_of(name, *overrides):
    return load_config(name, overrides=overrides, weights=False).config


@pytest.fixture(scope="module")
def llama():
    """The search that `jaxtrain plan llama3_8b --on h100x8 --search` makes, with the processor seconds it took."""
    began = time.process_time()
    found = search(config_of("llama3_8b"), H100X8)
    return found, time.process_time() - began


def test_tries_200_layouts_and_more_in_30_seconds(llama):
    found, seconds = llama
    candidates = list(layouts(config_of("llama3_8b"), 8, VARIED))
    assert found.tried == len(candidates) >= 200
    assert len({candidate.model_dump_json() for candidate in candidates}) == len(candidates)
    # Processor time: the clock would measure the other processes of a busy machine.
    assert seconds < 30


def test_what_is_ranked_fits_and_the_fastest_is_first(llama):
    found, _ = llama
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
        assert one.config.optimizer == config_of("llama3_8b").optimizer


def test_reasons_name_the_nearest_and_what_is_heavy(llama):
    found, _ = llama
    memory, heaviest, *refused = why_not(found)
    room = (H100X8.hardware.memory_bytes * 0.92) / 2**30
    assert memory.startswith(f"{len(found.too_large)} layouts need more memory than the {room:.2f} GiB there are;")
    assert describe_layout(found.too_large[0].config) in memory
    assert heaviest.startswith("their largest part: ")
    assert sum(map(int, re.findall(r"\((\d+)\)", heaviest))) <= len(found.too_large)
    assert sum(int(line.split()[0]) for line in refused) == len(found.refused)
    assert all(line.partition(" refused: ")[2] for line in refused)


# id: (config, overrides, reason of one refused layout)
REFUSALS = {
    "batch": (
        *("llama3_8b", []),
        r"global_batch_size=64 does not divide by data x fsdp x accumulation_steps = \d+ x \d+ x \d+; use 128",
    ),
    "heads": (
        "quickstart",
        [],
        r"heads of blocks/attention/query/kernel is 4, which does not divide by tensor=8; make",
    ),
    "layers": ("quickstart", [], r"3 layers do not divide by parallel\.pipe=2; use 2 or 4 layers, or parallel\.pipe=3"),
    "sequence": (
        *("quickstart", ["model.max_sequence_length=8190"]),
        r"data\.sequence_length=8190 does not divide by 2 x parallel.context=2 .*; make it 8188 or 8192",
    ),
    "microbatches of an interleaved pipeline": (
        *("quickstart", [*SMALL, "parallel.microbatches=3", "parallel.pipe=2", "--vary=schedule"]),
        r"microbatches",
    ),
}


@pytest.mark.parametrize(("name", "overrides", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_refused_layouts_say_why(name, overrides, pattern):
    vary = VARIED if "--vary=schedule" not in overrides else ("schedule",)
    found = search(config_of(name, *[word for word in overrides if not word.startswith("--")]), H100X8, vary=vary)
    assert any(re.search(pattern, one.reason) for one in found.refused), {one.reason for one in found.refused}
    assert all("\n" not in one.reason and one.layout for one in found.refused)


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


def test_a_search_refuses_the_stages_that_a_task_cannot_have():
    found = search(config_of("smollm2_dpo", "parallel.data=auto"), target_of(find("h100"), 2), vary=("mesh",))
    assert {one.degrees["pipe"] for one in found.ranked} == {1}
    assert any("the loss of task 'dpo' calls the model itself" in one.reason for one in found.refused)


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
    "a multiple": (["parallel.fsdp=8"], 8, 96, 96),
    "one less": (["parallel.fsdp=8"], 8, 95, 88),
    "just the least": (["parallel.fsdp=8"], 8, 8, 8),
    "none": (["parallel.fsdp=8"], 8, 7, None),
    "accumulation": (["parallel.data=4", "parallel.tensor=2", "train.accumulation_steps=4"], 16, 1000, 992),
    "pipeline": (["parallel.pipe=2", "parallel.data=4"], 16, 1000, 992),
    "pipeline with its microbatches": (["parallel.pipe=2", "parallel.data=4", "parallel.microbatches=8"], 32, 70, 64),
    # The trainer takes a pipeline's microbatches from accumulation where none are set.
    "pipeline with accumulation": (["parallel.pipe=2", "parallel.data=4", "train.accumulation_steps=8"], 32, 70, 64),
    "the starting batch does not matter": (["parallel.data=8", "train.global_batch_size=800"], 8, 30, 24),
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


def test_the_largest_batch_stops_where_nothing_limits_it():
    config = with_degrees(config_of("quickstart", *SMALL, "parallel.data=8"), 8)
    assert 1024 <= largest_batch(config, lambda _: True, most=1024) < 4096


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
    "no sharding": ("llama3_8b", "h100x8", ["parallel.fsdp=1"], "parallel.zero=1: "),
    "no remat": ("llama3_8b", "h100x8", ["remat.policy=none"], "remat.policy=dots: "),
    "large microbatches": ("llama3_8b", "a100-40x8", ["train.accumulation_steps=1"], "train.accumulation_steps=2: "),
    "several ways": (
        *("llama3_8b", "h100x8", ["remat.policy=dots", "parallel.fsdp=4", "train.accumulation_steps=4"]),
        "remat.policy=full: ",
    ),
    "images": ("resnet50_imagenet", "l4", [], "train.accumulation_steps="),
    "two changes": (
        *("llama3_8b", "a100-40x8", ["remat.policy=dots", "train.accumulation_steps=1"]),
        "remat.policy=full and train.accumulation_steps=2: ",
    ),
    # A microbatch keeps its rows on each device: 8 rows in 8 microbatches of one are 2 of 4.
    "more devices": (
        *("llama3_8b", "h100"),
        ["parallel.fsdp=1", "train.global_batch_size=8", "model.size=llama2_13b", "model.max_sequence_length=8192"],
        "h100x4 with parallel.fsdp=4 and train.accumulation_steps=2: ",
    ),
    "more devices and remat": (
        *("llama3_8b", "l4x8", ["remat.policy=none", "train.accumulation_steps=1"]),
        "l4x16 with parallel.pipe=8 and parallel.fsdp=2 and ",
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


def test_advice_says_so_when_it_knows_none():
    estimate = analyse(config_of("llama3_8b", "parallel.fsdp=1", "data.sequence_length=131072"), parse_targets("t4")[0])
    (line,) = advise(estimate)
    assert line.startswith("no single change, pair of changes or eight times the devices makes it fit")


# id: (content of a file, overrides)
AUTO = {
    "in a file": ("parallel: auto\n", []),
    "key of the group": ("parallel:\n  auto: true\n", []),
    "on the command line": ("", ["parallel=auto"]),
    "dotted on the command line": ("", ["parallel.auto=true"]),
    "with what it leaves alone": ("parallel: {auto: true, sequence_parallel: true}\n", []),
}


@pytest.mark.parametrize(("content", "overrides"), AUTO.values(), ids=AUTO)
def test_auto_is_read(tmp_path, content, overrides):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    loaded = load_config(path, overrides=overrides)
    assert loaded.config.parallel.auto
    assert loaded.origins["parallel.auto"] == ("command line" if overrides else f"mine.yaml:{content.count(chr(10))}")
    assert loaded.notes == ()


def test_auto_takes_the_place_of_the_degrees_of_a_shipped_config():
    loaded = load_config("llama3_8b", overrides=["parallel=auto"])
    assert [re.sub(r":\d+", "", note) for note in loaded.notes] == [
        "parallel.data (llama3_8b.yaml) gave way to parallel=auto (command line)",
        "parallel.fsdp (llama3_8b.yaml) gave way to parallel=auto (command line)",
    ]
    config, _ = chosen(loaded.config, H100X8)
    assert with_degrees(config, 8) == config


@pytest.mark.parametrize(
    "overrides", [["parallel=auto", "parallel.fsdp=2"], ["parallel={auto: true, fsdp: 2}"]], ids=str
)
def test_auto_and_a_degree_are_a_mistake(overrides):
    with pytest.raises(ConfigError) as caught:
        chosen(config_of("quickstart", *overrides), H100X8)
    said = "parallel.auto chooses every degree, but parallel.fsdp is set; leave one of them out"
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["llama3_8b", "quickstart", "resnet50_imagenet"])
def test_auto_picks_the_fastest_that_fits_and_says_why(name):
    asked = config_of(name, "parallel=auto")
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
    assert f"predicted {best.memory.total_bytes / 2**30:.2f} GiB a device, " in reasons[0]
    assert f"bound by {best.time.bound}" in reasons[0]
    assert reasons[1].startswith("the next: ")
    assert any("need more memory" in line for line in reasons) == bool(found.too_large)


def test_auto_says_what_is_nearest_where_nothing_fits():
    with pytest.raises(ConfigError) as caught:
        chosen(config_of("llama3_8b", "parallel=auto"), parse_targets("rtx4090")[0])
    message = str(caught.value)
    assert message.startswith("parallel.auto: no layout of rtx4090 fits: 1 layouts need more memory than the 2")
    assert "the smallest " in message
    assert "\n" not in message


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
