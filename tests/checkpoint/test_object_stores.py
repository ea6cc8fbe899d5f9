"""Checkpoints on gs:// and s3://, against servers that speak the protocols: kept, damaged, moved, failing, shared."""

import random
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from checkpoint_states import abstract, assert_same, make_state, mesh_of
from store_servers import BUCKET, environment, gs_server, needs_stores, s3_server
from test_two_processes import one_to_two_to_one

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer, places
from jaxtrain.checkpoint.places import RemotePath
from jaxtrain.checkpoint.run_folder import find_checkpoint, take
from jaxtrain.errors import CheckpointError, ConfigError

pytestmark = [pytest.mark.xdist_group("stores")]


@pytest.fixture(scope="module")
def servers():
    """Both servers, and the variables that lead to them."""
    with ExitStack() as stack:
        s3, gs = stack.enter_context(s3_server()), stack.enter_context(gs_server())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment(s3.address, gs.address).items():
            patch.setenv(name, value)
        yield {"s3": s3, "gs": gs}


@pytest.fixture(scope="module", params=["s3", "gs"])
def scheme(request):
    """One of the stores; of module scope, so that its rows come one after the other."""
    return request.param


@pytest.fixture
def store(request, servers, scheme):
    """The proxy of one store, and a folder of the test's own in it."""
    name = re.sub(r"\W+", "-", request.node.name)
    yield servers[scheme], RemotePath(f"{scheme}://{BUCKET}/{name}")
    servers[scheme].fault, servers[scheme].delay_seconds = None, 0.0


@pytest.fixture(scope="module")
def kept(servers, scheme):
    """A folder with steps 1 and 2 that no test writes to: copying its objects takes less than saving."""
    folder = RemotePath(f"{scheme}://{BUCKET}/kept")
    saved(folder, [1, 2])
    return folder


def small(number):
    """A state of two arrays that tells its step; one is too large to be kept in tables of Orbax."""
    return {"w": np.arange(20_000, dtype=np.float32) + number, "b": np.full(3, number, np.int32)}


def saved(folder, steps, **options):
    """Save small states in one sequence."""
    with Checkpointer(folder, **options) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, small(step), metadata={"step": step})


def copy(kept, folder):
    """Copy the steps of a folder, object by object."""
    for name in kept.files():
        (kept / name).copy_to(folder / name)


@needs_stores
def test_any_state_comes_back_on_another_mesh(store):
    _, folder = store
    state = make_state(mesh=mesh_of(4))
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.save(7, state, metadata={"a": 1}, eval_loss=0.5)
        assert not checkpointer.save(7, state, metadata={})
    with Checkpointer(folder, read_only=True) as checkpointer:
        assert (checkpointer.steps(), checkpointer.metadata()) == ([7], {"a": 1})
        for devices in (1, 8):
            assert_same(checkpointer.restore(abstract(state, mesh_of(devices))), state)
        checkpointer.verify(7)
        part = checkpointer.read({"params/mlp/kernel": abstract(state).params["mlp"]["kernel"]}, step=7)
        assert_same(part["params/mlp/kernel"], state.params["mlp"]["kernel"])
    assert find_checkpoint(str(folder)).step is None
    assert find_checkpoint(f"{folder}/7").step == 7


# Objects of a step, and what becomes of them.
DAMAGE = {
    "record gone": ("jaxtrain/metadata", None),
    "arrays of other bytes": ("state/d/", b"\x00" * 50),
}


@needs_stores
@pytest.mark.parametrize(("start", "content"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_step_is_passed_over(store, kept, start, content):
    _, folder = store
    copy(kept, folder)
    for name in [name for name in (folder / "2").files() if name.startswith(start)]:
        if content is None:
            (folder / "2" / name).unlink()
        else:
            (folder / "2" / name).write_bytes(content)
    lines: list[str] = []
    with Checkpointer(folder, report=lines.append) as checkpointer:
        restored = checkpointer.restore(small(0))
        np.testing.assert_array_equal(restored["w"], small(1)["w"])
        assert checkpointer.steps() == [1]
        if start == "jaxtrain/metadata":
            assert checkpointer.save(2, small(2), metadata={})
            checkpointer.wait()
            assert checkpointer.steps() == [1, 2]
            checkpointer.verify(2)
    assert [line.rpartition("; ")[2] for line in lines] == ["step 1 is used instead"]
    assert any(name.startswith("2.corrupt-") for name in folder.names())


@needs_stores
def test_a_store_that_fails_for_a_while_is_waited_for(store):
    """Every third request is answered with 503 for a while, and all are slow: nothing is lost or damaged."""
    proxy, folder = store
    count = [0]

    def every_third(method, path):
        count[0] += 1
        return 503 if count[0] % 3 == 0 and count[0] < 40 else None

    proxy.delay_seconds = 0.05
    lines: list[str] = []
    with proxy.failing(every_third), Checkpointer(folder, report=lines.append) as checkpointer:
        checkpointer.save(1, small(1), metadata={})
        checkpointer.wait()
        checkpointer.verify(1)
    assert (lines, Checkpointer(folder, read_only=True).steps()) == ([], [1])


@needs_stores
def test_what_may_not_be_read_is_one_line_and_no_damage(store, kept, capfd):
    """Rights say nothing about the content: the step keeps its name."""
    proxy, folder = store
    copy(kept, folder)

    def no_listing(method, path):
        return 403 if method == "GET" and ("list-type" in path or "delimiter" in path or path.endswith("/o")) else None

    def no_arrays(method, path):
        return 403 if method == "GET" and ("manifest" in path or "%2Fd%2F" in path or "/d/" in path) else None

    with proxy.failing(no_listing), pytest.raises(CheckpointError, match=r"^cannot read [^\n]*access denied[^\n]*$"):
        Checkpointer(folder, read_only=True).steps()
    with proxy.failing(no_arrays), Checkpointer(folder) as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.restore(small(0))
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert Checkpointer(folder, read_only=True).steps() == [1, 2]


@needs_stores
def test_of_two_starts_the_later_one_goes_on(store, tmp_path):
    """Another run is refused; the run itself on another machine is not, and the first stops before its next save."""
    _, folder = store
    for name in "ab":
        (tmp_path / name).mkdir()
    first = take(folder, tmp_path / "a", name="first", identity="1", takes_over=False, report=print)
    with pytest.raises(ConfigError, match="the run first"):
        take(folder, tmp_path / "b", name="second", identity="2", takes_over=False, report=print)
    assert first.other() is None
    take(folder, tmp_path / "b", name="again", identity="1", takes_over=False, report=print)
    assert "the run again" in str(first.other())


# id: (address, variables of the environment, what the line says)
REFUSED = {
    "no bucket of that name": ("s3://no-such-bucket/a", {}, "bucket no-such-bucket does not exist"),
    "no credentials": (
        f"s3://{BUCKET}/a",
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nonexistent"},
        "no credentials for s3://: set AWS_ACCESS_KEY_ID",
    ),
}


@needs_stores
def test_what_cannot_be_used_is_one_line(servers, tmp_path, monkeypatch):
    # A client that another test left in this process talks to the servers of that test.
    monkeypatch.setattr(places, "_client", places._client.__wrapped__)
    for address, variables, said in REFUSED.values():
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(ConfigError, match=rf"^[^\n]*{said}[^\n]*$"):
                take(RemotePath(address), tmp_path, name="n", identity="1", takes_over=False, report=print)
    assert list(tmp_path.iterdir()) == []


def train(run_dir, directory, steps):
    """A run that saves at every step; the same in every process."""
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    jt.fit(
        jt.from_functions(lambda key: {"w": jax.random.normal(key, (8, 4))}, lambda params, x: x @ params["w"]),
        jt.classification(),
        optax.adam(0.1),
        data=(x, x[:, :4].argmax(1)),
        steps=steps,
        batch_size=16,
        mesh=jt.make_mesh(devices=jax.devices()[:1]),
        run_dir=run_dir,
        resume="auto",
        checkpoint={"every": 1, "directory": directory},
        logging={"every": 1, "report": False, "tensorboard": False},
        callbacks=[jt.Callback(on_step=lambda moment: print(moment.step, flush=True))],
    )


@needs_stores
def test_a_run_that_is_killed_at_a_random_moment_goes_on_bit_for_bit(store, tmp_path):
    _, folder = store
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_object_stores import train\n"
    program += f"train({str(tmp_path / 'run')!r}, {str(folder)!r}, 100_000)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        time.sleep(random.uniform(0, 0.3))
        process.kill()
        last = max(map(int, process.stdout.read().split()), default=3) + 2
    train(tmp_path / "run", str(folder), last)
    train(tmp_path / "whole", None, last)
    ends = [Checkpointer(place, read_only=True).info(last) for place in (folder, tmp_path / "whole" / "checkpoints")]
    assert ends[0].digests == ends[1].digests


@needs_stores
def test_two_processes_go_on_with_what_one_saved_and_back(store):
    one_to_two_to_one(store[1])
