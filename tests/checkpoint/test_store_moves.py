"""Moves and going back in an object store that is a dictionary, cut off at every request that changes something."""

import errno

import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpointer, places
from jaxtrain.checkpoint.directory import SaveError, clear_leftovers, go_back, list_steps, live_steps, settle
from jaxtrain.checkpoint.places import RemotePath


class Store:
    """What `RemotePath` asks of a client, with `left` changes before the process is killed."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.left = 10**9

    def _change(self):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def ls(self, path, *, detail, refresh):
        found = {
            f"{path}/{name[len(path) + 1 :].split('/')[0]}" for name in self.objects if name.startswith(f"{path}/")
        }
        if not found:
            raise FileNotFoundError(path)
        return sorted(found)

    def info(self, path, *, refresh):
        return self.ls(path, detail=False, refresh=refresh)

    def find(self, path, *, refresh):
        return [name for name in self.objects if name.startswith(f"{path}/")]

    def cat_file(self, path):
        if path not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "none", path)
        return self.objects[path]

    def pipe_file(self, path, content, *, mode):
        self._change()
        self.objects[path] = content

    def cp_file(self, source, target):
        self._change()
        self.objects[target] = self.objects[source]

    def rm_file(self, path):
        self._change()
        self.objects.pop(path, None)


@pytest.fixture
def store(monkeypatch):
    client = Store()
    monkeypatch.setattr(places, "_client", lambda scheme: client)
    return client


def with_steps(client, steps):
    """A folder with complete steps, of which each object tells its step."""
    names = ("_CHECKPOINT_METADATA", "commit_success.txt", "jaxtrain/metadata", "state/d/1", "state/manifest.ocdbt")
    client.objects = {f"bucket/run/{step}/{name}": b"%d" % step for step in steps for name in names}
    client.left = 10**9
    return RemotePath("s3://bucket/run")


def test_a_step_on_its_way_back_is_not_taken_for_the_new_one(store):
    """A save that went back was killed before its step was complete, then the start that puts the old one back."""
    before = with_steps(store, [1, 2, 3]), dict(store.objects)
    for changes in range(40):
        folder = with_steps(store, [1, 2, 3])
        go_back(folder, after=1, step=2)
        store.left = changes
        try:
            settle(folder, print)
        except KeyboardInterrupt:
            store.left = 10**9
            assert live_steps(folder) in ([1, 3], [1, 2, 3]), changes  # who only reads finishes nothing
            assert settle(folder, print) is None
        else:
            assert changes > 10
        assert (folder, store.objects) == before, changes


def test_a_step_that_is_moved_away_is_lost_at_no_request(store):
    """The start that follows finds the whole step again, and puts it back: the new one was never written."""
    with_steps(store, [1, 2, 3])
    before = dict(store.objects)
    for changes in range(40):
        folder = with_steps(store, [1, 2, 3])
        store.left = changes
        try:
            go_back(folder, after=1, step=2)
        except KeyboardInterrupt:
            assert live_steps(folder) in ([1, 3], [1, 2, 3]), changes
        else:
            assert changes > 10
        store.left = 10**9
        assert settle(folder, print) is None
        assert store.objects == before, changes


def test_a_removal_that_is_cut_off_leaves_no_step(store):
    """Nor does what is left come back: the next save deletes it."""
    for changes in range(7):
        folder = with_steps(store, [1, 10, 100])
        store.left = changes
        try:
            places.remove_steps(folder, [1])
        except KeyboardInterrupt:
            store.left = 10**9
        assert list_steps(folder) == ([10, 100] if changes else [1, 10, 100]), changes
        clear_leftovers(folder)
        assert folder.names() == (["10", "100"] if changes else ["1", "10", "100"]), changes


def test_a_store_that_is_away_fails_a_save_and_no_run(store, monkeypatch):
    """A SaveError is what a run counts, and goes on after; see checkpoint.max_failed_in_a_row."""
    folder = with_steps(store, [1])
    checkpointer = Checkpointer(folder)

    def refused(path, **options):
        raise PermissionError("Forbidden")

    with monkeypatch.context() as patch:
        patch.setattr(store, "ls", refused)
        with pytest.raises(SaveError, match=r"^cannot save checkpoint s3://bucket/run/2: [^\n]*access denied[^\n]*$"):
            checkpointer.save(2, {"w": np.zeros(3)}, metadata={})
    (folder / "2" / "state" / "d").write_bytes(b"")
    checkpointer._make_room(3)  # what a save that failed left is deleted before the next one
    assert folder.names() == ["1"]
    checkpointer.release()
