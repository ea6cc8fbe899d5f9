"""Write the committed published folders in nf4 with jaxtrain, and open them with transformers and bitsandbytes.

    JAX_PLATFORMS=cpu python scripts/check_nf4_folders.py write FOLDERS
    ORACLE/bin/python scripts/check_nf4_folders.py open FOLDERS

ORACLE is an environment with `pip install 'jaxtrain[oracle]'`. The first line writes each folder of
tests/interop/published in floats and in nf4, and the logits that the second gives when it is read here. The second line
opens the folder in nf4, which must give the same logits (1e-4 of their range), and quantizes the one in floats with
bitsandbytes, which must save the same bytes; but torch's mean of the scales of a tensor, and what is counted from it,
may differ in the last bit. One line per folder; the exit code is 1 where one differs.
"""

# The imports of each half are installed in its own environment only.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
import argparse
import json
import sys
import tempfile
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


def write(folder: Path, names: list[str], dtype: str) -> int:
    """Write each folder twice, and the logits of the one in nf4."""
    import jax.numpy as jnp

    import jaxtrain as jt

    for origin in sorted(path for path in PUBLISHED.iterdir() if path.is_dir() and path.name in (names or [path.name])):
        arrays, made = dict(np.load(origin / "expected.npz")), folder / origin.name
        try:
            pretrained = jt.load_pretrained(origin)
            given = {"model": pretrained, "model_state": pretrained.model_state, "dtype": dtype}
            jt.save_pretrained(made / "nf4", pretrained.params, base="nf4", **given)
            jt.save_pretrained(made / "floats", pretrained.params, **given)
            kept = {} if "resnet" in origin.name else {"attention": "reference"}
            read = jt.load_pretrained(made / "nf4", model=kept)
        except jt.UserError as error:
            print(f"{origin.name}: {error}")
            continue
        inputs = {ours: jnp.asarray(arrays[theirs], jnp.int32) for theirs, ours in ENTRIES.items() if theirs in arrays}
        inputs = inputs["tokens"] if len(inputs) == 1 else inputs
        if "pixel_values" in arrays:
            inputs = jnp.asarray(arrays["pixel_values"].transpose(0, 2, 3, 1))
        outputs, _ = read.model.apply(read.params, read.model_state, inputs, key=None, train=False)
        outputs = outputs["logits"] if isinstance(outputs, dict) else outputs
        np.save(made / "logits.npy", np.asarray(outputs, np.float32))
        print(f"{origin.name}: written")
    return 0


def open_with_transformers(folder: Path) -> int:
    """Load what `write` wrote, and compare logits and bytes."""
    import bitsandbytes
    import torch
    import transformers
    from bitsandbytes import functional
    from safetensors import safe_open

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = 0
    for made in sorted(path for path in folder.iterdir() if path.is_dir()):
        arrays = dict(np.load(PUBLISHED / made.name / "expected.npz"))
        said = json.loads((made / "nf4" / "config.json").read_text())
        kind = getattr(transformers, said["architectures"][0])
        dtype = getattr(torch, said["dtype"])
        quantized = kind.from_pretrained(made / "nf4", dtype=dtype, device_map="cpu")
        # On some CPUs bitsandbytes multiplies in bfloat16, whatever it is told, and its kernel for CPUs misreads rows
        # that do not divide by 64. So what it has loaded is made floats here.
        model = kind.from_pretrained(made / "floats", attn_implementation="eager").float().eval()
        modules = {}
        for name, module in quantized.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                state = module.weight.quant_state
                packed, absmax = module.weight.data.reshape(-1).int(), state.absmax
                if state.nested:
                    absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
                levels = state.code[torch.stack([packed >> 4, packed & 15], 1)].reshape(-1)
                weight = levels * absmax.float().repeat_interleave(state.blocksize)[: len(levels)]
                modules[name] = tuple(state.shape)
                model.get_submodule(name).weight.data = weight.reshape(state.shape).to(dtype).float()
        entries = ("attention_mask", "token_type_ids", "pixel_values")
        given = {key: torch.from_numpy(arrays[key]) for key in entries if key in arrays}
        if "tokens" in arrays:  # an image model takes no tokens
            given["input_ids"] = torch.from_numpy(arrays["tokens"])
        if "decoder_tokens" in arrays:
            given["decoder_input_ids"] = torch.from_numpy(arrays["decoder_tokens"])
        with torch.no_grad():
            found = model(**given)
        theirs = (found.logits if "logits" in found else found.pooler_output).float().numpy()
        ours, real = np.load(made / "logits.npy"), ...
        if "attention_mask" in arrays and arrays["attention_mask"].shape == ours.shape[:2]:
            real = arrays["attention_mask"] == 1
        difference = float(np.abs(theirs[real] - ours[real]).max() / np.ptp(theirs))
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=said["quantization_config"]["llm_int8_skip_modules"],
        )
        again = kind.from_pretrained(made / "floats", dtype=dtype, quantization_config=config, device_map="cpu")
        with tempfile.TemporaryDirectory() as saved:
            again.save_pretrained(saved)
            with (
                safe_open(Path(saved) / "model.safetensors", "pt") as one,
                safe_open(made / "nf4" / "model.safetensors", "pt") as two,
            ):
                names = set(one.keys()) ^ set(two.keys())
                both = set(one.keys()) & set(two.keys())
                raw = {
                    name: [held.get_tensor(name).contiguous().view(torch.uint8) for held in (one, two)] for name in both
                }
        others = sorted(name for name, (left, right) in raw.items() if not torch.equal(left, right))
        means = {name for name in others if name.endswith(("nested_absmax", "bitsandbytes__nf4"))}
        wrong = sorted({*others, *names} - means)
        line = f"{len(modules)} layers, logits differ by {difference:.1e} of their range"
        print(f"{made.name}: {line}, {len(means)} of {len(both)} tensors by the mean's last bit; others: {wrong}")
        failed += difference > TOLERANCE or not modules or bool(wrong)
    return int(failed > 0)


def main() -> None:
    """Run one half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=["write", "open"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="folders of tests/interop/published; all, where none is named")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()
    half = open_with_transformers(arguments.folder) if arguments.half == "open" else None
    sys.exit(write(arguments.folder, arguments.names, arguments.dtype) if half is None else half)


if __name__ == "__main__":
    main()
