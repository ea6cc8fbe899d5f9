"""Make the tiny published folders of tests/weights/published/ with transformers, and what it computes with them.

    ORACLE/bin/python scripts/make_published_fixtures.py [NAME ...]

ORACLE is an environment with `pip install '.[oracle]'`. Every folder holds config.json and model.safetensors as
`save_pretrained` writes them, all weights random, and expected.npz (scripts/published_fixtures/fixture.py lists its
arrays). Each is made of the first seed whose weights put every setting of the config to use: a change of one moves the
outputs, and no rounding changes a generated token. config_old.json, where there is one, says the same in the form of
transformers 4; config_written.json, where there is one, is what transformers 5 writes and the published files do not
have. The folders are committed; without names, all are made anew.
"""

# pyright: reportMissingImports=false
import argparse
import datetime
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from published_fixtures import decoders, encoders, others
from published_fixtures.fixture import (
    Arrays,
    Fixture,
    Unsuitable,
    distances,
    gradients_of,
    make_model,
    move_of,
    outputs_of,
)

FIXTURES = (*decoders.FIXTURES, *encoders.FIXTURES, *others.FIXTURES)
TARGET = Path(__file__).resolve().parent.parent / "tests" / "weights" / "published"
# A reader that drops a setting is off by 3 times the tolerance of the comparison (1e-4 of the range) or more: the exact
# GELU and its approximation differ by little more than that.
LEAST_MOVE = 3e-4
MOST_SEEDS = 200


def attempt(fixture: Fixture, seed: int) -> tuple[Any, Arrays]:
    """Make the model and the arrays of a seed.

    Raises:
        Unsuitable: the weights leave a setting of the config without effect, or an answer to chance.
    """
    model = make_model(fixture, seed)
    arrays = fixture.expect(fixture, model, np.random.default_rng(seed))
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise Unsuitable("an output is not finite")
    for change in fixture.matters:
        move = move_of(fixture, model, arrays, change)
        if move < LEAST_MOVE:
            raise Unsuitable(f"{change} moves the outputs by {move:.1e} of their range")
    return model, arrays | gradients_of(fixture, model, arrays)


def write(fixture: Fixture, model: Any, arrays: Arrays, folder: Path) -> None:
    """Write the folder, and check that transformers reads it back to the same outputs in either form of its config."""
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(Path(made) / name, folder / name)
            (folder / name).chmod(0o644)
    config = json.loads((folder / "config.json").read_text())
    forms = {"config.json": config}
    if fixture.published is not None:
        forms = {"config.json": fixture.published(config), "config_written.json": config}
    if fixture.old is not None:
        forms["config_old.json"] = fixture.old(config)
    for name, form in forms.items():
        (folder / name).write_text(json.dumps(form, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    np.savez_compressed(folder / "expected.npz", allow_pickle=False, **arrays)
    for name in forms:
        with tempfile.TemporaryDirectory() as copy:
            shutil.copy(folder / name, Path(copy) / "config.json")
            shutil.copy(folder / "model.safetensors", copy)
            again = fixture.architecture.from_pretrained(copy, attn_implementation="eager").float().eval()
        expected = outputs_of(model, arrays)
        difference = max(distances(expected, outputs_of(again, arrays)))
        # Not the same bits: a product may be computed with its weight stored the other way round.
        assert difference < 1e-6, f"{fixture.name}: {name} reads back with a difference of {difference:.1e}"


def make(fixture: Fixture) -> str:
    """Make one folder, and return the line of the manifest."""
    reasons = []
    for seed in range(MOST_SEEDS):
        try:
            model, arrays = attempt(fixture, seed)
        except Unsuitable as error:
            reasons.append(str(error))
            continue
        folder = TARGET / fixture.name
        write(fixture, model, arrays, folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{fixture.name}: seed {seed}, {size / 1000:.0f} kB", flush=True)
        today = datetime.date.today().isoformat()
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return f"{fixture.architecture.__name__}, seed {seed}, {versions}, {today}"
    common = max(set(reasons), key=reasons.count)
    raise SystemExit(f"{fixture.name}: no seed under {MOST_SEEDS} will do; most often: {common}")


def main() -> None:
    """Make the folders and the manifest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="fixtures to make; all, where none is named")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = [fixture.name for fixture in FIXTURES]
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"no fixture is called {sorted(unknown)}; there are {known}")
    manifest = TARGET / "manifest.json"
    lines = json.loads(manifest.read_text()) if manifest.exists() else {}
    for fixture in FIXTURES:
        if not names or fixture.name in names:
            lines[fixture.name] = make(fixture)
            ordered = {name: lines[name] for name in known if name in lines}
            manifest.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
