"""The pages of docs/gallery/ run as printed and reach what they say; some train the same on a mesh and after a stop."""

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_gallery.py"


def load_script():
    """The script that reads and runs pages, as a module."""
    spec = importlib.util.spec_from_file_location("make_gallery", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def within(printed: str, claim: Claim) -> bool:
    """Whether the last number of the last line is the figure that the page claims."""
    lowest, highest = claim.figure
    return lowest <= float(re.findall(r"-?\d+(?:\.\d+)?", printed.splitlines()[-1])[-1]) <= highest


def test_every_page_is_in_the_table_and_in_the_index():
    index = (gallery.FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(PAGES) == gallery.page_names()
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == set(PAGES)
    assert set(re.findall(r'src="(\w+)\.png"', index)) == set(PAGES)


def test_pages_are_as_short_as_they_promise():
    for name, claim in PAGES.items():
        page, text = gallery.read_page(name), (gallery.FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert page.num_training_lines <= claim.lines, name
        assert f"]({name}.png)" in text
        assert 0 < (gallery.FOLDER / f"{name}.png").stat().st_size < 60_000, name
        assert within(gallery.printed_on(name), claim), f"what {name} says that it prints"
        assert max(map(len, page.program.splitlines())) <= 120, name


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_as_printed(name, tmp_path):
    printed = gallery.run_page(gallery.read_page(name), tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert within(printed, PAGES[name]), printed


# Two optimizers, rows that meet all others, inputs that are a nested dict, episodes drawn in the loss.
@pytest.mark.long
@pytest.mark.parametrize("name", ["gan", "contrastive", "graph_network", "reinforce"])
def test_a_page_trains_the_same_on_a_mesh_and_after_a_stop(name, tmp_path, monkeypatch):
    fit, called = jt.fit, []

    def few_steps(*parts, **settings):
        kept = {key: value for key, value in settings.items() if key not in ("steps", "epochs")}
        # Each step is logged; what costs time and has no say in the numbers is left out.
        kept |= {"logging": {"every": 1, "tensorboard": False, "report": False}}

        def train(folder, steps, **degrees):
            mesh = jt.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
            fit(*parts, **kept, steps=steps, mesh=mesh, run_dir=tmp_path / folder)
            rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
            return [row["loss"] for row in rows if "loss" in row]

        alone = train("alone", 4, data=1)
        train("stopped", 2, data=2, fsdp=4)
        resumed = train("stopped", 4, data=2, fsdp=4)
        assert len(resumed) == 4
        np.testing.assert_allclose(resumed, alone, rtol=1e-5)  # the bound of every layout
        called.append(parts)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jt, "fit", few_steps)
    page = gallery.read_page(name)
    exec(compile(f"{page.model}\n{page.training}", f"{name}.md", "exec"), {})
    assert len(called) == 1
