"""Write adapters of every committed published folder with jaxtrain, and open them with PEFT.

    JAX_PLATFORMS=cpu python scripts/check_peft.py write ADAPTERS
    ORACLE/bin/python scripts/check_peft.py open ADAPTERS

ORACLE is an environment with `pip install 'jaxtrain[oracle]'`. The first line adapts all linear layers of each folder
of tests/interop/published with random factors of their own, so that modules which hold several kernels are written as
blocks, and trains heads of labels whole. The second line loads them with PEFT, which must give the same logits (1e-4 of
their range) without any warning. One line per folder; the exit code is 1 where one differs.
"""

# The imports of each half are installed in its own environment only.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
import argparse
import json
import sys
import warnings
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PUBLISHED = HERE.parent / "tests" / "interop" / "published"
# float32 here and there, sums in another order.
TOLERANCE = 1e-4
# Entries of expected.npz -> ours.
ENTRIES = {
    "tokens": "tokens",
    "attention_mask": "segments",
    "token_type_ids": "token_types",
    "decoder_tokens": "decoder_tokens",
}


def write(folder: Path, names: list[str]) -> int:
    """Write an adapter per base, and the logits that it gives here."""
    import jax
    import jax.numpy as jnp

    import jaxtrain as jt

    for base in sorted(path for path in PUBLISHED.iterdir() if path.is_dir() and path.name in (names or [path.name])):
        arrays = dict(np.load(base / "expected.npz"))
        try:
            pretrained = jt.load_pretrained(base, model={} if "resnet" in base.name else {"attention": "reference"})
            head = tuple(path for path in jt.load_pretrained(base).places.params if path.startswith("head/output/"))
            lora = jt.LoraConfig(rank=2, alpha=5.0, rank_stabilised="2" in base.name, train_also=head)
            model = jt.adapt(pretrained.model, lora=lora)
        except jt.UserError as error:
            print(f"{base.name}: {error}")
            continue
        known = jax.tree_util.tree_leaves(pretrained.params)
        drawn, _ = model.init(jax.random.key(1))
        flat, structure = jax.tree_util.tree_flatten_with_path(drawn)
        bases, draw, leaves = iter(known), np.random.default_rng(0), []
        for path, leaf in flat:
            name = str(path[-1])
            if "lora_" in name:
                leaves.append(jnp.asarray(0.2 * draw.normal(size=leaf.shape), jnp.float32))
            else:
                leaves.append(next(bases) + (0.1 if "/".join(str(key.key) for key in path[:3]) in head else 0))
        params = jax.tree.unflatten(structure, leaves)
        given = {ours: jnp.asarray(arrays[theirs], jnp.int32) for theirs, ours in ENTRIES.items() if theirs in arrays}
        inputs = given["tokens"] if len(given) == 1 else given
        if not given:
            inputs = jnp.asarray(arrays["pixel_values"].transpose(0, 2, 3, 1))
        outputs, _ = model.apply(params, pretrained.model_state, inputs, key=None, train=False)
        outputs = outputs["logits"] if isinstance(outputs, dict) else outputs
        jt.save_adapter(folder / base.name, params, model=model, base=pretrained)
        np.save(folder / base.name / "logits.npy", np.asarray(outputs, np.float32))
        print(f"{base.name}: written")
    return 0


def open_with_peft(folder: Path) -> int:
    """Load what `write` wrote with PEFT, and compare the logits."""
    import peft
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = 0
    for made in sorted(path for path in folder.iterdir() if path.is_dir()):
        base = PUBLISHED / made.name
        arrays = dict(np.load(base / "expected.npz"))
        name = json.loads((base / "config.json").read_text())["architectures"][0]
        plain = getattr(transformers, name).from_pretrained(base, attn_implementation="eager").float().eval()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = peft.PeftModel.from_pretrained(plain, made).eval()
        kept = ("attention_mask", "token_type_ids", "pixel_values")
        given = {key: torch.from_numpy(arrays[key]) for key in kept if key in arrays}
        if "tokens" in arrays:  # an image model takes no tokens
            given["input_ids"] = torch.from_numpy(arrays["tokens"])
        if "decoder_tokens" in arrays:
            given["decoder_input_ids"] = torch.from_numpy(arrays["decoder_tokens"])
        with torch.no_grad():
            found = model(**given)
        theirs = (found.logits if "logits" in found else found.pooler_output).float().numpy()
        ours = np.load(made / "logits.npy")
        real = ...
        if "attention_mask" in arrays and arrays["attention_mask"].shape == ours.shape[:2]:
            real = arrays["attention_mask"] == 1
        difference = float(np.abs(theirs[real] - ours[real]).max() / np.ptp(theirs))
        lines = [str(one.message).splitlines()[0][:200] for one in said]
        # PEFT asks transformers for an attribute by its old name, whatever the adapter is.
        notes = "".join(f"; {line}" for line in lines if "is_gradient_checkpointing" not in line)
        print(f"{made.name}: logits differ by {difference:.1e} of their range{notes}", flush=True)
        failed += difference > TOLERANCE or bool(notes)
    return int(failed > 0)


def main() -> None:
    """Run one half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=["write", "open"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "names", nargs="*", help="folders of tests/interop/published to write of; all, where none is named"
    )
    arguments = parser.parse_args()
    sys.exit(
        write(arguments.folder, arguments.names) if arguments.half == "write" else open_with_peft(arguments.folder)
    )


if __name__ == "__main__":
    main()
