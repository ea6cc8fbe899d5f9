"""Progress in a notebook: one output that is updated, nothing on standard error."""

import sys
from types import SimpleNamespace

import pytest

from jaxtrain.metrics.progress import Progress
from jaxtrain.runtime.remarks import print_remark


class Page:
    """Stands in for a notebook: what `display` was called with, and what each output holds last."""

    def __init__(self):
        self.outputs, self.updates = [], 0

    def display(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.outputs.append(content)
        return SimpleNamespace(update=self.update)

    def update(self, content, *, raw):
        assert raw
        self.outputs[-1] = content
        self.updates += 1


@pytest.fixture
def page(monkeypatch):
    """This process as the kernel of a notebook."""
    shell = type("ZMQInteractiveShell", (), {})()
    page = Page()
    display = SimpleNamespace(display=page.display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return page


def train(progress, steps=40):
    with progress.phase("reading <data>"):
        pass
    progress.start(steps, 0)
    for step in range(1, steps + 1):
        progress.update(step, {"loss": 1 / step} if step % 10 == 0 else {})
    progress.message("step 40: eval loss 0.5")
    progress.finish(["done: step 40"])


def test_one_output_is_updated(page, capsys):
    with Progress() as progress:
        train(progress)
    (content,) = page.outputs
    assert '<progress value="40" max="40"' in content["text/html"]
    assert "reading &lt;data&gt; …" in content["text/html"]
    assert content["text/plain"].splitlines()[-1].startswith("40/40  loss 0.025")
    # Faster than a few updates per second nobody can read, and each passes through a socket.
    assert page.updates < 15
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[-1] == "done: step 40"


def test_remarks_are_no_errors(page, capsys):
    print_remark("checkpoint 4 is damaged; an older one is used")
    assert tuple(capsys.readouterr()) == ("checkpoint 4 is damaged; an older one is used\n", "")


def test_other_processes_are_silent(page, capsys):
    with Progress(process_index=1) as progress:
        train(progress)
    assert (page.outputs, *capsys.readouterr()) == ([], "", "")


def test_outside_a_notebook_progress_goes_to_standard_error(capsys):
    with Progress() as progress:
        train(progress)
    captured = capsys.readouterr()
    assert captured.err.startswith("reading <data> …")
    assert captured.out == "done: step 40\n"
