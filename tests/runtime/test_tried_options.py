"""Options that a compiler may give up with: taken or left out by all processes alike, told everywhere, remembered."""

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import from_functions, make_mesh, make_train_step, regression
from jaxtrain.runtime.tried_options import compile_trying, settle, try_options

BATCH = {"inputs": np.ones((2, 4), np.float32), "targets": np.ones((2, 1), np.float32)}
WORKS = {"xla_llvm_disable_expensive_passes": True}
FAILS = {"xla_no_such_option": True}


def small_step(tried, size=4, **options):
    model = from_functions(lambda key: {"w": jnp.ones((size, 1))}, lambda params, x: x @ params["w"][:4])
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    step = make_train_step(model, regression(), optax.sgd(0.1), mesh=mesh, compiler_options=options)
    step.compiler_options = replace(step.compiler_options, tried=tried)
    return step


@pytest.fixture
def cache(tmp_path):
    """A folder of compiled programs of a test's own; the programs themselves are not kept in it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def notes(folder):
    return sorted(folder.glob("gave-up-*.json"))


def attempts(step):
    """Compile, and give the options of each time that the compiler was asked with some, and the line of the step."""
    asked, lower = [], step.lower

    class Watched:
        def __init__(self, lowered):
            self.as_text, self._lowered = lowered.as_text, lowered

        def compile(self, compiler_options=None):
            asked.append(compiler_options)
            return self._lowered.compile(compiler_options=compiler_options)

    step.lower = lambda batch: Watched(lower(batch))
    step.compile(BATCH)
    assert step(step.init(0), BATCH)[1]["loss"] > 0
    lines = [line for line in step.choices if line.startswith("compiler: ")]
    return [options for options in asked if options], lines


def test_a_step_is_compiled_with_what_is_tried_and_says_so(cache):
    step = small_step(WORKS)
    asked, lines = attempts(step)
    assert (asked, lines) == ([WORKS], ["compiler: with xla_llvm_disable_expensive_passes"])
    assert step.compiled_with == {**step.compiler_options.used, **WORKS}
    assert notes(cache) == []
    assert attempts(small_step({})) == ([], [])


def test_a_second_start_goes_without_at_once(cache):
    step = small_step(FAILS)
    asked, (line,) = attempts(step)
    assert asked == [FAILS]
    assert line.startswith("compiler: goes without xla_no_such_option, with which it gave up: INVALID_ARGUMENT: ")
    assert step.compiled_with == step.compiler_options.used
    (note,) = notes(cache)
    again = small_step(FAILS)
    asked, (line,) = attempts(again)
    assert asked == []
    assert line == (
        f"compiler: goes without xla_no_such_option, with which it gave up at an earlier start ({note}; delete it to "
        f"try again): {json.loads(note.read_text())['gave_up']}"
    )
    assert again.compiled_with == again.compiler_options.used
    # As the line says.
    note.unlink()
    assert attempts(small_step(FAILS))[0] == [FAILS]


CHANGES = {
    "other options are tried": dict(tried={**FAILS, **WORKS}),
    "an option of the user": dict(xla_llvm_disable_expensive_passes=False),
    "another program": dict(size=5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_program_is_tried_again(cache, name):
    attempts(small_step(FAILS))
    asked, _ = attempts(small_step(**{"tried": FAILS, **CHANGES[name]}))
    assert asked == [CHANGES[name].get("tried", FAILS)]
    assert len(notes(cache)) == 2


def test_flags_of_the_environment_are_tried_again(cache, monkeypatch):
    attempts(small_step(FAILS))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
    assert attempts(small_step(FAILS))[0] == [FAILS]


DAMAGES = {
    "empty": lambda note: note.write_text(""),
    "half": lambda note: note.write_text(note.read_text()[:9]),
    "no text": lambda note: note.write_bytes(b"\xff\xfe\x00"),
    "another kind": lambda note: note.write_text("[1]"),
    "no reason": lambda note: note.write_text('{"gave_up": 3}'),
    "nested": lambda note: note.write_text("[" * 100_000),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_note_costs_a_try(cache, name):
    attempts(small_step(FAILS))
    (note,) = notes(cache)
    DAMAGES[name](note)
    asked, (line,) = attempts(small_step(FAILS))
    assert asked == [FAILS]
    assert "at an earlier start" not in line
    assert attempts(small_step(FAILS))[0] == [], "the note was written anew"


def test_a_folder_that_cannot_be_written_costs_a_try(cache, monkeypatch):
    step = small_step(FAILS)

    def refuse(*_):
        raise PermissionError(13, "read-only")

    with monkeypatch.context() as without:
        # Whoever runs the tests may be root, whom the modes of a folder do not stop.
        without.setattr(os, "replace", refuse)
        assert attempts(step)[0] == [FAILS]
    assert list(cache.iterdir()) == []
    assert attempts(small_step(FAILS))[0] == [FAILS]
    (note,) = notes(cache)
    cache.chmod(0o500)
    try:
        assert attempts(small_step(FAILS))[0] == [], "a note is read where none can be written"
    finally:
        cache.chmod(0o700)
    assert notes(cache) == [note]


@pytest.mark.parametrize("folder", [None, "gs://bucket/compiled"])
def test_without_a_folder_each_start_tries(cache, folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    for _ in range(2):
        step = small_step(FAILS)
        attempt = try_options(step.lower(BATCH), step.compiler_options, step.mesh)
        assert (attempt.compiled, attempt.note, attempt.was_known) == (None, None, False)


class GivesUp:
    """A lowered program whose compiler gives up in a way of its own."""

    def __init__(self, lowered, error, always=False):
        self.as_text, self._lowered, self._error, self._always = lowered.as_text, lowered, error, always

    def compile(self, compiler_options=None):
        if compiler_options or self._always:
            raise self._error
        return self._lowered.compile()


@pytest.mark.parametrize("everyone", [["{}"], ["", "{}"]], ids=["alone", "the second of two"])
@pytest.mark.parametrize(
    ("message", "is_kept"),
    [("RESOURCE_EXHAUSTED: Ran out of vmem", True), ("UNAVAILABLE: Socket closed", False), ("", True)],
)
def test_only_what_says_something_of_the_program_is_kept(cache, message, is_kept, everyone):
    step = small_step(FAILS)
    lowered = GivesUp(step.lower(BATCH), jax.errors.JaxRuntimeError(message))
    attempt = try_options(lowered, step.compiler_options, step.mesh)
    taken = settle(attempt, [why.format(attempt.gave_up) for why in everyone], step.compiler_options)
    assert taken.tried == {}
    where = " on process 1" if len(everyone) > 1 else ""
    assert taken.lines == (
        f"compiler: goes without xla_no_such_option, with which it gave up{where}: {message or 'JaxRuntimeError'}",
    )
    assert len(notes(cache)) == is_kept


def test_a_program_that_never_compiles_leaves_no_note(cache):
    step = small_step(FAILS)
    lowered = GivesUp(step.lower(BATCH), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: hbm"), always=True)
    attempt = try_options(lowered, step.compiler_options, step.mesh)
    with pytest.raises(jax.errors.JaxRuntimeError, match="hbm"):
        settle(attempt, [attempt.gave_up], step.compiler_options)
    assert notes(cache) == []


def test_a_process_that_did_not_give_up_goes_without_where_another_one_did(cache):
    step = small_step(WORKS)
    lowered = step.lower(BATCH)
    attempt = try_options(lowered, step.compiler_options, step.mesh)
    assert attempt.compiled is not None
    taken = settle(attempt, ["", "RESOURCE_EXHAUSTED: vmem"], step.compiler_options)
    assert taken.tried == {}
    assert "gave up on process 1: RESOURCE_EXHAUSTED: vmem" in taken.lines[0]
    again = try_options(lowered, step.compiler_options, step.mesh)
    assert (again.compiled, again.gave_up, again.was_known) == (None, "RESOURCE_EXHAUSTED: vmem", True)


def test_a_program_of_this_process_alone_is_compiled_with_or_without():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(()))
    rows = {
        "nothing is tried": ({}, {}, 0),
        "it works": (WORKS, WORKS, 1),
        "it gives up": (FAILS, {}, 1),
    }
    for name, (tried, expected, num_lines) in rows.items():
        taken = compile_trying(lambda more: lowered.compile(compiler_options=dict(more) or None), tried)
        assert (taken.tried, len(taken.lines)) == (expected, num_lines), name
        assert float(taken.compiled(jnp.zeros(()))) == 1.0


def test_a_note_of_another_process_is_told_as_such(cache):
    """Each process has notes of its own: where that of one is deleted, those of the others still count."""
    first, second = small_step(WORKS), small_step(FAILS)
    attempts(second)
    knows = try_options(second.lower(BATCH), second.compiler_options, second.mesh)
    assert knows.was_known
    tries = try_options(first.lower(BATCH), first.compiler_options, first.mesh)
    (line,) = settle(tries, [tries.told, knows.told], first.compiler_options).lines
    assert (
        "gave up on process 1 at an earlier start (it has a note; delete that of each process to try again): " in line
    )
    written = json.loads(tries.note.read_text())["gave_up"]
    assert written == knows.gave_up, "the reason alone"
    (line,) = settle(knows, [knows.told, tries.told], second.compiler_options).lines
    assert (
        f"on process 0 at an earlier start ({knows.note}; delete that of each process to try again): {written}" in line
    )


def test_a_process_that_gives_up_itself_beside_a_note_of_another_one_says_whose_it_is(cache):
    step = small_step(FAILS)
    attempt = try_options(step.lower(BATCH), step.compiler_options, step.mesh)
    (line,) = settle(attempt, [attempt.told, f"at an earlier start: {attempt.gave_up}"], step.compiler_options).lines
    assert "which it gave up on process 0: INVALID_ARGUMENT" in line
