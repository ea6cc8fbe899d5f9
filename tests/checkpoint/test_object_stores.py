"""Checkpoints on gs:// and s3://, against servers that speak the protocols: kept, damaged, moved, failing, shared."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
from checkpoint_states import abstract, assert_same, make_state, mesh_of
from store_servers import BUCKET, environment, free_port, gs_server, needs_stores, s3_server

from jaxtrain.checkpoint import Checkpointer, going_back, owner, remote
from jaxtrain.checkpoint.find import find_checkpoint
from jaxtrain.checkpoint.owner import take
from jaxtrain.checkpoint.remote import RemotePath
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


@needs_stores
def test_the_rules_keep_what_they_keep_on_a_disk(store, tmp_path):
    _, folder = store
    left = []
    for place in (folder, tmp_path):
        with Checkpointer(place, keep_last=2, keep_every=3, keep_best=True) as checkpointer:
            for step in range(1, 6):
                loss = 0.1 if step == 2 else 1.0
                checkpointer.save(step, small(step), metadata={}, eval_loss=loss)
                checkpointer.wait()
                assert len(checkpointer.steps()) >= min(step, 2)  # never fewer than are kept
            assert checkpointer.steps() == [2, 3, 4, 5]
            checkpointer.add_eval_loss(4, 0.01)
            checkpointer.save(6, small(6), metadata={})
        left.append(Checkpointer(place, read_only=True).steps())
    assert left == [[3, 4, 5, 6]] * 2
    assert {name.partition("/")[0] for name in folder.files()} == {"3", "4", "5", "6"}


# Every kind of object of a step, and what becomes of it.
DAMAGE = {
    "record gone": ("jaxtrain/metadata", None),
    "manifest gone": ("state/manifest.ocdbt", None),
    "arrays gone": ("state/d/", None),
    "arrays of other bytes": ("state/d/", b"\x00" * 50),
    "arrays of a process gone": ("state/ocdbt.process_0/d/", None),
    "marker gone": ("commit_success.txt", None),
}


@needs_stores
@pytest.mark.parametrize(("start", "content"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_step_is_passed_over(store, kept, start, content):
    _, folder = store
    copy(kept, folder)
    for name in [name for name in (folder / "2").files() if name.startswith(start)]:
        if content is None:
            (folder / "2" / name).delete()
        else:
            (folder / "2" / name).write_bytes(content)
    lines: list[str] = []
    with Checkpointer(folder, report=lines.append) as checkpointer:
        restored = checkpointer.restore(small(0))
        np.testing.assert_array_equal(restored["w"], small(1)["w"])
        assert checkpointer.steps() == [1]
        if start in ("jaxtrain/metadata", "commit_success.txt"):  # what was set aside, and what is deleted
            assert checkpointer.save(2, small(2), metadata={})
            checkpointer.wait()
            assert checkpointer.steps() == [1, 2]
            checkpointer.verify(2)
    if start != "commit_success.txt":  # without it there is no step that could be damaged
        assert [line.rpartition("; ")[2] for line in lines] == ["step 1 is used instead"]
        assert any(name.startswith("2.corrupt-") for name in folder.names())


@needs_stores
def test_a_move_that_was_cut_off_is_finished(store, kept, monkeypatch):
    """A save that goes back moves a step of its number away; test_store_moves.py cuts it off after each request."""
    _, folder = store
    copy(kept, folder)
    left = [14]

    def cut(method):
        def counted(self, *arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return method(self, *arguments, **options)

        return counted

    with monkeypatch.context() as patch, Checkpointer(folder) as checkpointer:
        checkpointer.restore(small(0), step=1)
        for name in ("write_bytes", "copy_to", "delete"):
            patch.setattr(RemotePath, name, cut(getattr(RemotePath, name)))
        with contextlib.suppress(KeyboardInterrupt):
            checkpointer.save(2, small(20), metadata={})
        patch.undo()
    with Checkpointer(folder, keep_last=9) as checkpointer:
        checkpointer.save(3, small(3), metadata={})
        checkpointer.wait()
        assert checkpointer.steps()[0] == 1
        for step in checkpointer.steps():
            checkpointer.verify(step)
        (old,) = [place for place in (*going_back.abandoned_folders(folder), folder) if holds(place, 2, small(2))]
    assert not any("moving" in name for name in folder.files()), old


def holds(place, step, state):
    """Whether an intact step has this state."""
    with Checkpointer(place, read_only=True) as checkpointer:
        if step not in checkpointer.steps():
            return False
        checkpointer.verify(step)
        return bool((checkpointer.restore(state, step=step)["w"] == state["w"]).all())


@needs_stores
def test_a_store_that_fails_for_a_while_is_waited_for(store):
    """Every third request is answered with 503 for a while: clients ask again, and nothing is lost or damaged."""
    proxy, folder = store
    count = [0]

    def every_third(method, path):
        count[0] += 1
        return 503 if count[0] % 3 == 0 and count[0] < 40 else None

    lines: list[str] = []
    with proxy.failing(every_third), Checkpointer(folder, report=lines.append) as checkpointer:
        checkpointer.save(1, small(1), metadata={})
        checkpointer.wait()
        checkpointer.verify(1)
    assert (lines, Checkpointer(folder, read_only=True).steps()) == ([], [1])


@needs_stores
def test_slow_answers_change_nothing(store, kept):
    proxy, _ = store
    proxy.delay_seconds = 0.2
    with Checkpointer(kept, read_only=True) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore(small(0))["w"], small(2)["w"])


@needs_stores
def test_a_listing_that_is_refused_is_one_line_and_no_damage(store, kept):
    proxy, _ = store

    def refused(method, path):
        return 403 if method == "GET" and ("list-type" in path or "delimiter" in path or path.endswith("/o")) else None

    with proxy.failing(refused), pytest.raises(CheckpointError, match=r"^cannot read [^\n]*access denied[^\n]*$"):
        Checkpointer(kept, read_only=True).steps()
    assert Checkpointer(kept, read_only=True).steps() == [1, 2]


@needs_stores
def test_arrays_that_may_not_be_read_are_no_damage(store, kept, capfd):
    """Rights say nothing about the content: the step keeps its name."""
    proxy, folder = store
    copy(kept, folder)

    def refused(method, path):
        return 403 if method == "GET" and ("manifest" in path or "%2Fd%2F" in path or "/d/" in path) else None

    with proxy.failing(refused), Checkpointer(folder) as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.restore(small(0))
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert Checkpointer(folder, read_only=True).steps() == [1, 2]


@needs_stores
def test_a_store_that_never_answers_is_given_up(scheme, servers, monkeypatch):
    """With waits of a hundredth of a second: what is counted is how often it is asked."""
    asked = []
    with socket.create_server(("127.0.0.1", 0), backlog=99) as listener, monkeypatch.context() as patch:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
            patch.setenv(name, address)
        patch.setattr(remote, "_READ_SECONDS", 0.01)
        patch.setattr(remote, "_client", remote._client.__wrapped__)
        with pytest.raises(OSError, match=r"^[^\n]+$"):
            RemotePath(f"{scheme}://{BUCKET}/a").names()
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(listener.accept())
    for connection, _ in asked:
        connection.close()
    assert 1 < len(asked) <= 10  # times 60 seconds


@needs_stores
def test_a_folder_belongs_to_one_run(store, tmp_path):
    _, folder = store
    runs = [tmp_path / name for name in "ab"]
    for run in runs:
        run.mkdir()
    first, line = take(folder, runs[0], name="first", takes_over=False)
    assert (line, first.other()) == (None, None)
    again, line = take(folder, runs[0], name="first", takes_over=False)  # the same run, started again
    assert (line, again.other()) == (None, None)
    assert "the run first" in str(first.other())
    # It has no checkpoint yet.
    refused = r"^checkpoint.directory: [^\n]* is that of the run first \([^\n]*, which has no checkpoint there; [^\n]*$"
    with pytest.raises(ConfigError, match=refused):
        take(folder, runs[1], name="second", takes_over=False)
    assert list(runs[1].iterdir()) == []
    _, line = take(folder, runs[1], name="second", takes_over=True)
    assert "taken over from the run first" in str(line)
    assert "the run second" in str(again.other())
    with pytest.raises(ConfigError, match="the run second"):
        take(folder, runs[0], name="first", takes_over=False)


@needs_stores
def test_of_two_starts_at_once_one_gets_the_folder(store, tmp_path, monkeypatch):
    """Both have looked and found nobody. S3 lets one write; the emulator lets both, which the second look finds."""
    _, folder = store
    for name in "ab":
        (tmp_path / name).mkdir()
    first, _ = take(folder, tmp_path / "a", name="first", takes_over=False)
    read, blind = owner._read, [True]
    monkeypatch.setattr(owner, "_read", lambda place: None if blind and blind.pop() else read(place))
    if folder.scheme == "s3":
        with pytest.raises(ConfigError, match="the run first"):
            take(folder, tmp_path / "b", name="second", takes_over=False)
        assert first.other() is None
    else:
        take(folder, tmp_path / "b", name="second", takes_over=False)
        assert "the run second" in str(first.other())  # who stops before its next save


@needs_stores
def test_copies_go_to_a_store_and_come_back(store, tmp_path):
    _, folder = store
    with Checkpointer(tmp_path / "steps", mirror=folder) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, small(step), metadata={})
            checkpointer.wait()
    assert Checkpointer(folder, read_only=True).steps() == [2, 3]
    shutil.rmtree(tmp_path / "steps")
    lines: list[str] = []
    with Checkpointer(tmp_path / "steps", mirror=folder, report=lines.append) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore(small(0))["w"], small(3)["w"])
        checkpointer.verify(3)
    assert "copied back from" in lines[0]


# id: (address, variables of the environment, what the line says)
REFUSED = {
    "no bucket of that name": ("s3://no-such-bucket/a", {}, "there is no bucket no-such-bucket"),
    "no bucket of that name at Google's": ("gs://no-such-bucket/a", {}, "there is no bucket no-such-bucket"),
    "no credentials": (
        f"s3://{BUCKET}/a",
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nonexistent"},
        "no credentials for s3://: set AWS_ACCESS_KEY_ID",
    ),
    "no server": (f"s3://{BUCKET}/a", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "cannot be used"),
}


@needs_stores
@pytest.mark.parametrize(("address", "variables", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_one_line(servers, tmp_path, address, variables, said):
    program = (
        "import sys\nfrom pathlib import Path\nfrom jaxtrain.checkpoint.owner import take\n"
        "from jaxtrain.checkpoint.places import place_at\nfrom jaxtrain.errors import ConfigError\n"
        "try:\n    take(place_at(sys.argv[1], what=''), Path(sys.argv[2]), name='n', takes_over=False)\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, address, str(tmp_path)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.stdout.count("\n") == 1, answer.stderr
    assert said in answer.stdout
    assert list(tmp_path.iterdir()) == []


TWO = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

root, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address, initialization_timeout=60)
from jaxtrain.checkpoint import Checkpointer

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, P("fsdp"))
with Checkpointer(root, keep_last=2) as checkpointer:
    state = checkpointer.restore({"w": jax.ShapeDtypeStruct((20_000,), jnp.float32, sharding=split)})
    double = jax.jit(lambda s: {"w": s["w"] * 2}, donate_argnums=0)
    for step in (2, 3):
        state = double(state)
        assert checkpointer.save(step, state, metadata={"step": step})
    checkpointer.wait()
    checkpointer.verify(3)
    assert checkpointer.steps() == [2, 3], checkpointer.steps()
"""


@needs_stores
def test_two_processes_go_on_with_what_one_saved_and_back(store):
    _, folder = store
    whole = np.arange(20_000, dtype=np.float32)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"w": whole}, metadata={})
    port = str(free_port())
    started = [
        subprocess.Popen([sys.executable, "-c", TWO, str(folder), str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    with Checkpointer(folder, read_only=True) as checkpointer:
        assert checkpointer.metadata() == {"step": 3}
        np.testing.assert_array_equal(checkpointer.restore({"w": whole})["w"], 4 * whole)
