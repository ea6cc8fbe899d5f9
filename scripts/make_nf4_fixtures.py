"""Make tests/precision/nf4.npz with bitsandbytes, and tests/weights/published_nf4/ with transformers and bitsandbytes.

    ORACLE/bin/python scripts/make_nf4_fixtures.py

ORACLE is an environment with `pip install '.[oracle]'`. The first holds weights and what bitsandbytes makes of
them on a CPU: codes and scales, without and with double quantization. The second is a tiny Llama as `save_pretrained`
writes it after loading with load_in_4bit, and its logits in float32.
"""

# pyright: reportMissingImports=false
import shutil
import tempfile
from pathlib import Path

import bitsandbytes
import numpy as np
import torch
import transformers
from bitsandbytes import functional

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def weights() -> dict[str, torch.Tensor]:
    """Name -> weight [out, in]: usual ones, and what is easily wrong."""
    random = np.random.default_rng(0)

    def normal(rows: int, inputs: int) -> np.ndarray:
        return (0.03 * random.standard_normal((rows, inputs))).astype(np.float32)

    levels = functional.get_4bit_type("nf4", device="cpu").numpy()
    middles = (levels[:-1] + levels[1:]) / 2
    ties = np.zeros((8, 64), np.float32)
    ties[:, 0] = 1
    ties[:, 1:16] = middles
    ties[:, 16:31] = np.nextafter(middles, np.float32(2))
    ties[:, 31:46] = np.nextafter(middles, np.float32(-2))
    zeros = normal(8, 128)
    zeros[::2, :64] = 0
    zeros[1::2, 64:] = -0.0
    wide = normal(12, 192) * np.float32(10) ** random.integers(-6, 3, (12, 192)).astype(np.float32)
    # With the bits of bfloat16, which take half of the place.
    usual = torch.from_numpy(normal(60, 320)).bfloat16().float().numpy()
    found = {"usual": usual, "ties": ties, "zeros": zeros, "wide": wide, "nothing": np.zeros((4, 64), np.float32)}
    tensors = {f"{name} float32": torch.from_numpy(value) for name, value in found.items()}
    half = normal(16, 128)
    return tensors | {f"half {name}": torch.from_numpy(half).to(dtype) for name, dtype in DTYPES.items()}


def main() -> None:
    """Make both."""
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {"map": functional.create_dynamic_map().numpy()}
    for name, weight in weights().items():
        codes, plain = functional.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
        _, double = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        rows = len(weight)
        arrays |= {
            # float16 and bfloat16 are exact in float32.
            f"{name}/weight": weight.float().numpy(),
            f"{name}/codes": codes.numpy().reshape(rows, -1),
            f"{name}/absmax": plain.absmax.numpy().reshape(rows, -1),
            f"{name}/doubled": double.absmax.numpy().reshape(rows, -1),
            f"{name}/nested_absmax": double.state2.absmax.numpy(),
            f"{name}/offset": double.offset.numpy(),
        }
    np.savez_compressed(ROOT / "tests/precision/nf4.npz", **arrays)  # pyright: ignore[reportArgumentType]
    make_folder(ROOT / "tests/weights/published_nf4")
    print(
        f"bitsandbytes {bitsandbytes.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )


def make_folder(folder: Path) -> None:
    """Make the published folder."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as floats:
        model.save_pretrained(floats)
        quantized = transformers.AutoModelForCausalLM.from_pretrained(
            floats, dtype=torch.float32, quantization_config=quantization, device_map="cpu"
        )
    quantized.save_pretrained(folder)
    tokens = torch.arange(12)[None] * 5 % 32
    # On some CPUs bitsandbytes multiplies in bfloat16, whatever it is told.
    # So the floats that it makes are multiplied.
    for name, module in quantized.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            model.get_submodule(name).weight.data = weight
    with torch.no_grad():
        logits = model(tokens).logits.float().numpy()
    np.savez_compressed(folder / "expected.npz", tokens=tokens.numpy(), logits=logits)


if __name__ == "__main__":
    main()
