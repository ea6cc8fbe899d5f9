"""The pages of docs/gallery/ run as printed, reach what they say, and train the same on a mesh and after a stop."""

import re
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from gallery_pages import MESH, NUM_STEPS, last_call, load_script, losses

gallery = load_script()


@dataclass(frozen=True)
class Claim:
    """What a page promises.

    Attributes:
        lines: most lines of its training block, without imports and blank lines.
        figure: lowest and highest value of the last number that it prints.
    """

    lines: int
    figure: tuple[float, float]


# Accuracies may fall by what three seeds differ in (0.02) from those on the pages; chance is 0.1.
PAGES = {
    "nnx_classifier": Claim(5, (0.95, 1)),
    "linen_classifier": Claim(5, (0.95, 1)),
    "vae": Claim(15, (20, 27)),  # nats; a decoder that knows nothing gives 64 ln 2 = 44
    "ddpm": Claim(15, (0.05, 0.3)),  # predicting no noise at all gives 1
    "gan": Claim(15, (0.3, 1.35)),  # 1.386 is a discriminator that can tell nothing apart, 0 a generator that lost
    "contrastive": Claim(15, (0.4, 1)),  # chance is 0.03
    "distillation": Claim(10, (0.93, 1)),
    "dpo": Claim(10, (17, 23)),  # height; the reference stays at 12
    "reinforce": Claim(20, (-18, 0)),  # -41 at random
    "equinox": Claim(10, (0.9, 1)),
    "graph_network": Claim(10, (0.92, 1)),  # 0.3 of the nodes are of the most frequent class
    "two_learning_rates": Claim(3, (0.94, 1)),
    "early_stopping": Claim(3, (60, 600)),  # the best step
}
# Pages train for seconds each.
ROWS = [pytest.param(name, id=name, marks=pytest.mark.long) for name in PAGES]


def test_every_page_is_in_the_table_and_in_the_index():
    index = (gallery.FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(PAGES) == gallery.page_names()
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == set(PAGES)
    assert set(re.findall(r'src="(\w+)\.png"', index)) == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_short_as_it_promises(name):
    page, text = gallery.read_page(name), (gallery.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert page.num_training_lines <= PAGES[name].lines
    assert f"]({name}.png)" in text
    assert 0 < (gallery.FOLDER / f"{name}.png").stat().st_size < 60_000
    assert within(gallery.printed_on(name), PAGES[name]), "what the page says that it prints"
    assert max(map(len, page.program.splitlines())) <= 120
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize("name", ROWS)
def test_a_page_runs_as_printed(name, tmp_path):
    printed = gallery.run_page(gallery.read_page(name), tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert within(printed, PAGES[name]), printed


@pytest.mark.parametrize("name", ROWS)
def test_a_page_trains_the_same_on_a_mesh_and_after_a_stop(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, on_one_device = last_call(gallery.read_page(name), tmp_path, monkeypatch)
    whole = call.train(tmp_path / "whole", MESH)
    assert len(on_one_device) == NUM_STEPS
    np.testing.assert_allclose(losses(tmp_path / "whole"), on_one_device, rtol=1e-5)  # the bound of every layout

    call.train(tmp_path / "stopped", MESH, steps=NUM_STEPS // 2)
    resumed = call.train(tmp_path / "stopped", MESH)
    assert (resumed.step, losses(tmp_path / "stopped")) == (NUM_STEPS, losses(tmp_path / "whole"))
    jax.tree.map(
        np.testing.assert_array_equal,
        (resumed.state.params, resumed.state.optimizer_state, resumed.state.model_state),
        (whole.state.params, whole.state.optimizer_state, whole.state.model_state),
    )


def within(printed: str, claim: Claim) -> bool:
    """Whether the last number of the last line is the figure that the page claims."""
    lowest, highest = claim.figure
    return lowest <= float(re.findall(r"-?\d+(?:\.\d+)?", printed.splitlines()[-1])[-1]) <= highest


@pytest.mark.parametrize(("printed", "is_within"), [("a: 3\naccuracy: 0.96", True), ("a: 0.96\naccuracy: 0.9", False)])
def test_the_last_number_decides(printed, is_within):
    assert within(printed, Claim(1, (0.95, 1))) == is_within
