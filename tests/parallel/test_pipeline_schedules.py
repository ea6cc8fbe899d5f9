"""Pipeline schedules: order, bubble and live inputs are those stated, and the runner's slots hold what it reads."""

import importlib.util
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.parallel.schedules import SCHEDULES, Schedule, check, make_schedule

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "show_schedule.py"
PLAIN = [(name, p, m, 1) for name in ("gpipe", "1f1b") for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 16, 32)]
INTERLEAVED = [("interleaved_1f1b", p, p * g, v) for p in (1, 2, 3, 4, 8) for g in (1, 2, 4) for v in (2, 3, 4)]
CASES = PLAIN + INTERLEAVED

# Fractions, so that the bubble counted from the table must equal the formula exactly.
COSTS = [(Fraction(1), Fraction(2)), (Fraction(7, 3), Fraction(1, 5)), (Fraction(1), Fraction(0))]


def case_id(case):
    name, p, m, v = case
    return f"{name},p={p},m={m}" + (f",v={v}" if v > 1 else "")


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def schedule(request):
    return make_schedule(*request.param)


def test_the_rows_cover_every_schedule():
    assert {name for name, *_ in CASES} == set(SCHEDULES)


def test_order(schedule):
    check(schedule)
    assert (schedule.num_stages, schedule.num_ticks) == (len(schedule.forward[0]), len(schedule.backward))


@pytest.mark.parametrize(("forward_cost", "backward_cost"), COSTS)
def test_bubble_is_the_formula(schedule, forward_cost, backward_cost):
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    assert schedule.bubble_fraction(forward_cost, backward_cost) == Fraction(p - 1, v * m + p - 1)


def test_bubble_with_the_costs_it_has_by_default():
    assert make_schedule("1f1b", 4, 16).bubble_fraction() == 3 / 19


def test_num_ticks(schedule):
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    expected = {"gpipe": 2 * (m + p - 1) - 1, "1f1b": m + 2 * (p - 1), "interleaved_1f1b": v * m + v * p + p - 2}
    assert schedule.num_ticks == expected[schedule.name]


def test_peak_of_live_inputs(schedule):
    """Whatever m is, at most (v+1)p-1-2s live on stage s: its forwards begin in tick s and its backwards in tick
    vp-1 + p-1-s, so that (v+1)p-1-2s are in when the first goes out, and then one comes for each that goes."""
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    for s in range(p):
        expected = m if schedule.name == "gpipe" else min(v * m, (v + 1) * p - 1 - 2 * s)
        assert schedule.peak_live(s) == expected
    assert schedule.peak_live() == max(schedule.peak_live(s) for s in range(p))


def run_tables(schedule: Schedule):
    """Moves labels (microbatch, virtual stage) through buffers as the runner moves arrays.

    Returns what was done: the labels of all forwards and of all backwards. Asserts that each reads its own input.
    """
    tables = schedule.tables()
    p, last = schedule.num_stages, schedule.num_stages * schedule.num_chunks - 1
    inputs = [[None] * tables.num_slots for _ in range(p)]
    gradients = [[None] * tables.num_gradient_slots for _ in range(p)]
    up: list = [None] * p  # what each stage receives at the start of the tick
    down: list = [None] * p
    done = {"forward": [], "backward": []}
    for tick in range(schedule.num_ticks):
        sent_up: list = [None] * p
        sent_down: list = [None] * p
        for s in range(p):
            for arrives, slots, buffer in (
                (up[s], tables.receive_slot, inputs[s]),
                (down[s], tables.receive_gradient_slot, gradients[s]),
            ):
                # A slot is filled exactly when something arrives that somebody will read.
                assert (slots[tick, s] >= 0) == (arrives is not None)
                if arrives is not None:
                    buffer[slots[tick, s]] = arrives

            i, c = tables.forward_microbatch[tick, s], tables.forward_chunk[tick, s]
            assert (i >= 0) == (c >= 0)
            if i >= 0:
                k = c * p + s
                slot = tables.forward_slot[tick, s]
                assert slot == -1 if k == 0 else inputs[s][slot] == (i, k)
                done["forward"].append((i, k))
                sent_up[s] = (i, k + 1) if k < last else None
            else:
                assert tables.forward_slot[tick, s] == -1

            i, c = tables.backward_microbatch[tick, s], tables.backward_chunk[tick, s]
            assert (i >= 0) == (c >= 0)
            if i >= 0:
                k = c * p + s
                slot, gradient_slot = tables.backward_slot[tick, s], tables.backward_gradient_slot[tick, s]
                assert slot == -1 if k == 0 else inputs[s][slot] == (i, k)
                assert gradient_slot == -1 if k == last else gradients[s][gradient_slot] == (i, k)
                done["backward"].append((i, k))
                sent_down[s] = (i, k - 1) if k > 0 else None
            else:
                assert (tables.backward_slot[tick, s], tables.backward_gradient_slot[tick, s]) == (-1, -1)
        up = [sent_up[(s - 1) % p] for s in range(p)]
        down = [sent_down[(s + 1) % p] for s in range(p)]
    assert up == down == [None] * p
    return done


def test_slots_hold_what_is_read(schedule):
    done = run_tables(schedule)
    every = [(i, k) for i in range(schedule.num_microbatches) for k in range(schedule.num_stages * schedule.num_chunks)]
    assert sorted(done["forward"]) == sorted(done["backward"]) == every


def test_number_of_slots(schedule):
    """No more than are live on some stage; in these schedules a gradient is read in the tick in which it arrives."""
    tables = schedule.tables()
    p, v = schedule.num_stages, schedule.num_chunks
    # Stage 0 keeps tokens of its first chunk, which take no slot, so that stage 1 needs most.
    assert tables.num_slots == (schedule.peak_live(1) if p > 1 else v - 1)
    assert tables.num_gradient_slots == (1 if p * v > 1 else 0)
    for field, array in vars(tables).items():
        if isinstance(array, np.ndarray):
            assert array.shape == (schedule.num_ticks, p), field
            assert array.dtype == np.int32, field


def test_a_slot_taken_too_early_is_noticed():
    """The simulation above can fail: with every input in slot 0, a backward reads what came later."""
    schedule = make_schedule("1f1b", 4, 8)
    tables = schedule.tables()
    one_slot = {
        name: np.minimum(getattr(tables, name), 0) for name in ("receive_slot", "forward_slot", "backward_slot")
    }

    class Broken(Schedule):
        def tables(self):
            return replace(tables, **one_slot)

    with pytest.raises(AssertionError):
        run_tables(Broken(**vars(schedule)))


def edit(table, *changes):
    """The table with cells (tick, stage) set."""
    rows = [list(row) for row in table]
    for tick, stage, cell in changes:
        rows[tick][stage] = cell
    return tuple(map(tuple, rows))


GOOD = make_schedule("1f1b", 2, 3)  # forward: i+s; backward: i+2-s
CHUNKED = make_schedule("interleaved_1f1b", 2, 2, 2)
BROKEN = {
    "two forwards swapped": (
        replace(GOOD, forward=edit(GOOD.forward, (0, 0, (1, 0)), (1, 0, (0, 0)))),
        "forward of microbatch 0 on virtual stage 1 is in tick 1, but what it needs from virtual stage 0 is made in "
        "tick 1",
    ),
    "two backwards swapped": (
        replace(GOOD, backward=edit(GOOD.backward, (2, 0, (1, 0)), (3, 0, (0, 0)))),
        "backward of microbatch 1 on virtual stage 0 is in tick 2, but what it needs from virtual stage 1 is made in "
        "tick 2",
    ),
    "last stage goes back first": (
        # Microbatch 1 is done forward in tick 2 on stage 1.
        replace(GOOD, backward=edit(GOOD.backward, (1, 1, (1, 0)), (2, 1, (0, 0)), (2, 0, (1, 0)), (3, 0, (0, 0)))),
        "backward of microbatch 1 on the last virtual stage is in tick 1, before its forward in tick 2",
    ),
    "two chunks swapped": (
        replace(CHUNKED, forward=edit(CHUNKED.forward, (0, 0, (0, 1)), (2, 0, (0, 0)))),
        "forward of microbatch 0 on virtual stage 1 is in tick 1, but what it needs from virtual stage 0 is made in "
        "tick 2",
    ),
    "a forward missing": (
        replace(GOOD, forward=edit(GOOD.forward, (2, 0, None))),
        "forward of microbatch 2 on virtual stage 0 never comes",
    ),
    "a backward twice": (
        replace(GOOD, backward=edit(GOOD.backward, (4, 1, (0, 0)))),
        "backward of microbatch 0 on virtual stage 1 comes more than once",
    ),
    "no such microbatch": (
        replace(GOOD, forward=edit(GOOD.forward, (2, 0, (3, 0)))),
        "forward in tick 2 on stage 0 is of (3, 0), which does not exist",
    ),
    "an empty tick": (
        replace(GOOD, forward=(*GOOD.forward, (None, None)), backward=(*GOOD.backward, (None, None))),
        "no stage does anything in tick 5",
    ),
    "ticks without backwards": (
        replace(GOOD, backward=GOOD.backward[:-1]),
        "5 ticks of forwards but 4 of backwards",
    ),
    "a stage missing": (
        replace(GOOD, forward=(GOOD.forward[0][:1], *GOOD.forward[1:])),
        "tick 0 has cells for [1, 2] stages, not 2",
    ),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN)
def test_check_refuses(broken, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(broken)


BAD_INPUT = {
    "unknown": (("zero_bubble", 4, 8, 1), "parallel.schedule=zero_bubble is not .* gpipe, 1f1b, interleaved_1f1b"),
    "no stages": (("1f1b", 0, 8, 1), "parallel.pipe=0 is too small; use 1 or more"),
    "no microbatches": (("gpipe", 4, 0, 1), "parallel.microbatches=0 is too small; use 1 or more"),
    "no chunks": (("interleaved_1f1b", 4, 8, 0), "parallel.chunks=0 is too small; use 1 or more"),
    "gpipe in chunks": (("gpipe", 4, 8, 2), "parallel.chunks=2 .*schedule=gpipe; set parallel.chunks=1 or .*interl"),
    "1f1b in chunks": (("1f1b", 4, 8, 2), "parallel.chunks=2 .*schedule=1f1b; set parallel.chunks=1 or .*interl"),
    "one chunk": (("interleaved_1f1b", 4, 8, 1), "parallel.chunks of 2 or more, not 1; set parallel.chunks=2 or"),
    "no multiple": (("interleaved_1f1b", 4, 10, 2), "microbatches=10 .*pipe=4.* use parallel.microbatches=8 or 12,"),
    "fewer than stages": (("interleaved_1f1b", 4, 3, 2), "microbatches=3 .*pipe=4.* use parallel.microbatches=4,"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_with_a_way_out(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_schedule(*arguments)
    assert "\n" not in str(caught.value)


def test_text():
    assert show_schedule().draw_text(make_schedule("1f1b", 2, 3)).splitlines() == [
        "1f1b: 2 stages, 3 microbatches, 5 ticks; bubble 25.0%; peak live inputs 3 (by stage 3, 1)",
        "",
        "tick      0 1 2 3 4",
        "stage 0 F 0 1 2 . .",
        "        B . . 0 1 2",
        "stage 1 F . 0 1 2 .",
        "        B . 0 1 2 .",
    ]


def test_text_goes_on_below_where_the_terminal_ends():
    lines = show_schedule().draw_text(make_schedule("interleaved_1f1b", 2, 4, 2), width=30).splitlines()[1:]
    assert max(map(len, lines)) <= 30
    assert lines[2] == "stage 0 F 0a 1a 0b 1b 2a 3a 2b"
    assert " ".join(line[9:] for line in lines if line.startswith("tick")).split() == [str(t) for t in range(12)]


def show_schedule():
    spec = importlib.util.spec_from_file_location("show_schedule", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script(tmp_path, capsys):
    path = tmp_path / "schedule.png"
    arguments = ["interleaved_1f1b", "--stages", "4", "--microbatches", "8", "--chunks", "2", "--picture", str(path)]
    assert show_schedule().main(arguments) == 0
    assert "bubble 15.8%; peak live inputs 11" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1f1b --stages 4 --microbatches 0", "parallel.microbatches=0"),
        ("1f1b --stages four --microbatches 8", "--stages"),
        ("1f1b --stages 4", "--microbatches"),
        ("1f1b --stages 4 --microbatches 8 --picture /nowhere/schedule.png", "/nowhere/schedule.png"),
    ],
)
def test_script_errors_are_one_line(arguments, message, capsys):
    try:
        code = show_schedule().main(arguments.split())
    except SystemExit as stopped:  # argparse's way out
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
