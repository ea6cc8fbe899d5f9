"""Moves and going back in an object store that is a dictionary, cut off at every request that changes something."""

import errno

import pytest

from jaxtrain.checkpoint import places
from jaxtrain.checkpoint.directory import go_back, live_steps, settle
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


@pytest.mark.parametrize("move", ["away", "back"])
def test_a_step_that_is_moved_is_lost_at_no_request(store, move):
    """A save that goes back is killed before its step is complete; the next start puts the old step back, or is killed
    while it does, and the one after that finishes. Who only reads finishes nothing."""
    before = with_steps(store, [1, 2, 3]), dict(store.objects)
    for changes in range(40):
        folder = with_steps(store, [1, 2, 3])
        if move == "back":
            go_back(folder, after=1, step=2)
        store.left = changes
        try:
            go_back(folder, after=1, step=2) if move == "away" else settle(folder, print)
        except KeyboardInterrupt:
            store.left = 10**9
            assert live_steps(folder) in ([1, 3], [1, 2, 3]), changes
        else:
            assert changes > 10
        store.left = 10**9
        settle(folder, print)
        assert (folder, store.objects) == before, changes
