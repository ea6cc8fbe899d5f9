"""The committed folders of published models hold what their readers and writers are compared with.

Made by scripts/make_published_fixtures.py, whose docstrings list the arrays.
"""

import json
from pathlib import Path

import numpy as np
import pytest

PUBLISHED = Path(__file__).resolve().parent / "published"
MANIFEST = json.loads((PUBLISHED / "manifest.json").read_text(encoding="utf-8"))


def test_the_manifest_lists_every_folder_with_its_versions():
    assert sorted(MANIFEST) == sorted(path.name for path in PUBLISHED.iterdir() if path.is_dir())
    assert all("transformers 5." in line and "torch 2." in line for line in MANIFEST.values())


@pytest.mark.parametrize("name", MANIFEST)
def test_a_folder_is_small_and_whole(name):
    folder = PUBLISHED / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000
    header_bytes = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((folder / "model.safetensors").read_bytes()[8 : 8 + header_bytes])
    assert header.pop("__metadata__") == {"format": "pt"}
    for config in folder.glob("config*.json"):
        assert json.loads(config.read_text(encoding="utf-8"))["architectures"][0] == MANIFEST[name].split(",")[0]
    arrays = dict(np.load(folder / "expected.npz"))
    assert {"logits", "last_hidden_state"} & set(arrays)
    gradients = {key.removeprefix("grad:"): array for key, array in arrays.items() if key.startswith("grad:")}
    for tensor, gradient in gradients.items():
        assert list(gradient.shape) == header[tensor]["shape"]
    assert not gradients or {"loss", "labels"} <= set(arrays)
