"""Moves in an object store that is a dictionary, cut off at every request that changes something."""

import errno

import pytest

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.directory import list_steps, set_aside
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


def test_a_step_that_is_moved_is_lost_at_no_request(store):
    """A save that goes back is killed while it renames a step; the next start that writes finishes it."""
    moved = {}
    for changes in range(40):
        folder = with_steps(store, [1, 2, 3])
        store.left = changes
        try:
            set_aside(folder, 2, reason="abandoned")
        except KeyboardInterrupt:
            store.left = 10**9
            assert list_steps(folder) in ([1, 3], [1, 2, 3]), changes
            places.finish_moves(folder)
        else:
            assert changes > 10
        assert list_steps(folder) in ([1, 3], [1, 2, 3] if changes == 0 else []), changes
        objects = {name.replace(name.split("/")[2], name.split("/")[2].partition("-")[0]) for name in store.objects}
        moved[changes] = objects
    assert all(objects == moved[39] for changes, objects in moved.items() if changes)
    assert any("/2.abandoned/" in name for name in moved[39])
