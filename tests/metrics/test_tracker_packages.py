"""Packages of trackers: what they are given, an import that fails once, a database that two runs open at once."""

import contextlib
import sys
import threading
import types

import pytest

from jaxtrain.config.schema import LoggingConfig
from jaxtrain.metrics.trackers.opened import open_trackers
from jaxtrain.metrics.trackers.packages import import_package, importable_again
from jaxtrain.metrics.trackers.table import _alone_in

INFO = {"name": "r", "config": {"train": {"steps": 4}, "seed": 0}, "git_commit": "abc"}
PACKAGE = {
    "__init__.py": "import {name}.errors\nfrom {name} import late\nfound = {name}.errors.Wrong\n",
    "errors.py": "class Wrong(Exception):\n    pass\n",
    "late.py": "import os\nif os.environ.pop('FAILS_ONCE', None):\n    raise SystemError('AST constructor')\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose first import fails once its first module is there."""
    name = "tracker_that_fails_once"
    (tmp_path / name).mkdir()
    for file, text in PACKAGE.items():
        (tmp_path / name / file).write_text(text.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FAILS_ONCE", "1")
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_an_import_that_failed_once_works_at_the_next_try(package):
    with pytest.raises(SystemError, match="AST constructor"):
        import_package(package)
    assert [name for name in sys.modules if name.startswith(package)] == []
    assert import_package(package).found.__name__ == "Wrong"


def test_what_was_imported_whole_stays_where_something_else_fails(package, monkeypatch):
    monkeypatch.delenv("FAILS_ONCE")
    found = import_package(package)
    with pytest.raises(OSError, match="down"), importable_again():
        raise OSError("down")
    assert sys.modules[package] is found
    assert f"{package}.errors" in sys.modules


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        pytest.param("sqlite:///{0}/a.db", "sqlite:///{0}/a.db", True, id="one database"),
        pytest.param("sqlite+pysqlite:///{0}/a.db?timeout=9", "sqlite:///{0}/a.db", True, id="options"),
        pytest.param("sqlite:///{0}/a.db", "sqlite:///{0}/new/a.db", False, id="another folder"),
        pytest.param("sqlite:///{0}/a.db", "http://localhost:5000", False, id="server"),
        pytest.param("sqlite:///{0}/file/a.db", "sqlite:///{0}/file/a.db", False, id="no folder"),
    ],
)
def test_one_run_at_a_time_opens_a_database(tmp_path, first, second, waits):
    (tmp_path / "file").touch()
    opened = threading.Event()

    def open_second():
        with _alone_in(second.format(tmp_path)):
            opened.set()

    thread = threading.Thread(target=open_second)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone_in(first.format(tmp_path)))
        thread.start()
        assert opened.wait(0.3 if waits else 20) != waits
    assert opened.wait(20)
    thread.join(20)
    assert not (tmp_path / "a.db").exists()


class _FakeWandbRun:
    offline, url = True, None

    def __init__(self, calls, settings):
        self.id, self.calls, self.summary = settings.get("id") or "id1", calls, {}
        self.settings = types.SimpleNamespace(sync_dir="folder")

    def define_metric(self, *names, **more):
        pass

    def log(self, values):
        self.calls.append(values)

    def mark_preempting(self):
        self.calls.append("preempting")

    def finish(self, exit_code):
        self.calls.append(("finish", exit_code, self.summary["status"]))


def test_wandb_resumes_its_own_run(tmp_path, monkeypatch):
    calls, settings = [], []

    def init(**given):
        settings.append(given)
        return _FakeWandbRun(calls, given)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, login=lambda prompt: True))
    for step, status in ((1, "preempted"), (5, "done")):
        config = LoggingConfig(wandb=True, tags={"team": "a", "api_key": "s3cret"})
        trackers = open_trackers(tmp_path, config, info=INFO, is_resumed=step > 1, report=lambda line: None)
        trackers.scalars(step, {"loss": 0.5, "model_flops_utilization": None, "grad_norm": float("nan")})
        trackers.end(status)
    assert [given["id"] for given in settings] == [None, "id1"]
    assert settings[0]["config"] == {"train.steps": 4, "seed": 0}
    assert {"team=a", "git_commit=abc", "api_key=(redacted)"} <= set(settings[0]["tags"])
    first, second = {"step": 1, "loss": 0.5}, {"step": 5, "loss": 0.5}
    assert calls == [first, "preempting", ("finish", 75, "preempted"), second, ("finish", 0, "done")]


def test_trackio_gets_numbers_with_their_step_in_a_run_of_its_own(tmp_path, monkeypatch, capsys):
    calls, names = [], []

    def init(**given):
        print("* Created new run")
        names.append((given["name"], given["resume"]))
        return types.SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
        )

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
    for step in (1, 5):
        trackers = open_trackers(
            tmp_path, LoggingConfig(trackio=True), info=INFO, is_resumed=step > 1, report=lambda line: None
        )
        trackers.scalars(step, {"loss": float("nan"), "tokens": 8})
        trackers.end("done")
    assert calls == [
        *((1, {"tokens": 8}), (1, {"status": "done"}), "finish"),
        *((5, {"tokens": 8}), (5, {"status": "done"}), "finish"),
    ]
    [(first, begun), (second, resumed)] = names
    assert (begun, resumed, first) == ("never", "allow", second)
    assert first.startswith("r-")
    assert capsys.readouterr().out == ""
