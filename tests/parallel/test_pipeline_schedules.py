"""Pipeline schedules: order, bubble and live inputs are those stated, and the runner's slots hold what it reads."""

from fractions import Fraction

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.parallel.schedules import SCHEDULES, Schedule, make_schedule

# Stages, microbatches, chunks per stage.
PLAIN = [(p, m, 1) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 16)]
CHUNKED = [(p, p * g, v) for p in (1, 2, 3, 4, 8) for g in (1, 2, 4) for v in (2, 3)]
# Fractions, so that the bubble counted from the table must equal the formula exactly.
COSTS = [(Fraction(1), Fraction(2)), (Fraction(7, 3), Fraction(1, 5))]


@pytest.fixture(scope="module", params=SCHEDULES)
def schedules(request):
    rows = CHUNKED if request.param == "interleaved_1f1b" else PLAIN
    return [make_schedule(request.param, *row) for row in rows]


def test_ticks_and_bubble_are_those_of_the_formulas(schedules):
    for schedule in schedules:
        p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        expected = {"gpipe": 2 * (m + p - 1) - 1, "1f1b": m + 2 * (p - 1), "interleaved_1f1b": v * m + v * p + p - 2}
        assert schedule.num_ticks == len(schedule.backward) == expected[schedule.name]
        for costs in COSTS:
            assert schedule.bubble_fraction(*costs) == Fraction(p - 1, v * m + p - 1)
    assert make_schedule("1f1b", 4, 16).bubble_fraction() == 3 / 19


def test_peak_of_live_inputs(schedules):
    """Whatever m is, at most (v+1)p-1-2s live on stage s: its forwards begin in tick s and its backwards in tick
    vp-1 + p-1-s, so that (v+1)p-1-2s are in when the first goes out, and then one comes for each that goes."""
    for schedule in schedules:
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
                assert (i, k) in done["forward"]
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


def test_slots_hold_what_is_read(schedules):
    """No more of them than are live on some stage; a gradient is read in the tick in which it arrives."""
    for schedule in schedules:
        p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        done = run_tables(schedule)
        assert sorted(done["forward"]) == sorted(done["backward"]) == [(i, k) for i in range(m) for k in range(p * v)]
        tables = schedule.tables()
        # Stage 0 keeps tokens of its first chunk, which take no slot, so that stage 1 needs most.
        assert tables.num_slots == (schedule.peak_live(1) if p > 1 else v - 1)
        assert tables.num_gradient_slots == (1 if p * v > 1 else 0)


def test_chunks_without_interleaving_are_one_line_with_a_way_out():
    with pytest.raises(ConfigError, match=r"schedule=1f1b has parallel.chunks of 1, not 2"):
        make_schedule("1f1b", 4, 8, 2)
