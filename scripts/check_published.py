"""Open a folder that jaxtrain exported with transformers, and compare it with what is expected of it.

    ORACLE/bin/python scripts/check_published.py FOLDER [--expected tests/interop/published/llama/expected.npz]
        [--original tests/interop/published/llama] [--tolerance 1e-4]
    ORACLE/bin/python scripts/check_published.py FOLDERS --original tests/interop/published

ORACLE is an environment with `pip install 'jaxtrain[oracle]'`. The folder must load without any missing or unexpected
tensor, and without any warning that the original folder does not bring too; its outputs, and the tokens it generates,
must be those of the arrays; its tensors must have the names and the bytes of those of the original folder. One line per
check; the exit code is 1 where one fails. In the second form every folder of FOLDERS is compared with the one of its
name and the expected.npz there; scripts/export_published.py makes such folders of the committed ones.
"""

# Its imports are installed in the environment of the oracle only.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from published_fixtures.fixture import outputs_of
from safetensors import safe_open


class Kept(logging.Handler):
    """Keeps the warnings that transformers logs, which no filter of `warnings` sees."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load(folder: Path) -> tuple[Any, list[str]]:
    """Load the model, and return it with the complaints of transformers about the folder."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kept = Kept()
    logger = transformers.logging.get_logger("transformers")
    logger.addHandler(kept)
    transformers.logging.disable_progress_bar()
    transformers.logging.warning_once.cache_clear()  # or the second folder would bring fewer warnings than the first
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # The head is the class's that wrote the folder: a model found by its `model_type` alone has none.
            model, about = getattr(transformers, architecture).from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
    finally:
        logger.removeHandler(kept)
    complaints = [*kept.lines, *(str(one.message) for one in caught)]
    complaints += [f"{what}: {sorted(map(str, names))[:3]}" for what, names in about.items() if names]
    return model.eval(), complaints


def differences(model: Any, expected: dict[str, np.ndarray], tolerance: float) -> list[str]:
    """Compare outputs and generated tokens with the arrays, those of long rows too."""
    found = []
    for end in ("", "_long"):
        arrays = {name.removesuffix(end): array for name, array in expected.items() if name.endswith(end)}
        if "tokens" not in arrays and "pixel_values" not in arrays:
            continue
        counts = np.ones(()) == 1
        if "attention_mask" in arrays and "decoder_tokens" not in arrays:
            counts = arrays["attention_mask"] == 1
        for name, array in outputs_of(model, arrays).items():
            per_token = counts.ndim and array.ndim == 3
            ours, theirs = (one[counts] if per_token else one for one in (array, arrays[name]))
            share = float(np.abs(ours - theirs).max() / np.ptp(theirs))
            print(f"{name}{end}: the largest difference is {share:.1e} of the range")
            if not share <= tolerance:
                found.append(f"{name}{end} differ by {share:.1e} of their range, over {tolerance:.0e}")
        if "generated" in arrays:
            found += generated_otherwise(model, arrays, end)
    return found


def generated_otherwise(model: Any, arrays: dict[str, np.ndarray], end: str) -> list[str]:
    """Compare the greedy tokens with those of the arrays."""
    prompt = torch.from_numpy(arrays["prompt" if "prompt" in arrays else "tokens"])
    mask = torch.ones_like(prompt) if "prompt" in arrays else torch.from_numpy(arrays["attention_mask"])
    of_decoder = prompt.shape[1] if "prompt" in arrays else 1
    model.generation_config.eos_token_id = None
    length = arrays["generated"].shape[1] - of_decoder
    tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=length, do_sample=False, use_cache=True)
    same = np.array_equal(tokens.numpy(), arrays["generated"])
    print(f"generated{end}: {'the same' if same else 'other'} tokens")
    return [] if same else [f"generated{end} holds other tokens"]


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the values of every tensor of a folder, in one file or in several."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def other_bytes(folder: Path, original: Path) -> list[str]:
    """Compare names, dtypes, shapes and bytes of the tensors of two folders."""
    ours, theirs = dict(tensors(folder)), dict(tensors(original))
    found = [f"{name} is missing" for name in sorted(theirs.keys() - ours.keys())]
    found += [f"{name} is not in the original" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name], theirs[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}")
        # Compared as bytes: -0.0 and NaN count too.
        elif one.flatten().view(torch.uint8).ne(other.flatten().view(torch.uint8)).any():
            found.append(f"{name} holds other values")
    print(f"{len(ours)} tensors, {len(found)} unlike the original")
    return found


def check(folder: Path, expected: Path | None, original: Path | None, tolerance: float) -> list[str]:
    """Run the checks of one folder, and return what is wrong with it.

    Args:
        folder: with config.json and safetensors.
        expected: file of arrays; None: outputs are not compared.
        original: folder whose tensors the other must repeat; None: they are not compared.
        tolerance: of the outputs, as a share of their range.
    """
    try:
        model, complaints = load(folder)
    except Exception as error:  # whatever transformers raises is what is wrong with the folder
        return [f"{type(error).__name__}: {error}"]
    usual = load(original)[1] if original else []
    failures = [complaint for complaint in complaints if complaint not in usual]
    print(
        f"{type(model).__name__}: {len(failures)} complaints of transformers {transformers.__version__}, beside "
        f"{len(complaints) - len(failures)} that the original brings too"
    )
    if expected:
        try:
            failures += differences(model, dict(np.load(expected)), tolerance)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    if original:
        failures += other_bytes(folder, original)
    return failures


def main() -> None:
    """Run the checks that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--expected", type=Path, help="expected.npz of a published folder")
    parser.add_argument("--original", type=Path, help="folder whose tensors the export must repeat")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of the outputs, as a share of their range")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(arguments.folder, arguments.expected, arguments.original)]
    if not (arguments.folder / "config.json").exists():
        if arguments.original is None:
            parser.error(f"{arguments.folder} has no config.json; to check every folder in it, give --original")
        folders = sorted(path.parent for path in arguments.folder.glob("*/config.json"))
        originals = [arguments.original / folder.name for folder in folders]
        cases = [(folder, one / "expected.npz", one) for folder, one in zip(folders, originals, strict=True)]
    failed = 0
    for folder, expected, original in cases:
        print(f"{folder.name}:", flush=True)
        failures = check(folder, expected, original, arguments.tolerance)
        failed += bool(failures)
        for failure in failures:
            print(f"FAILED: {failure}", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} folders are as expected")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
