"""Makes what the tests of GGUF files compare with, in tests/weights/.

gguf_blocks.npz holds random blocks of each quantized GGUF type, and what ggml's package makes of them.
gguf_pieces.json holds a small SentencePiece BPE model, as GGUF keeps it, and the ids that SentencePiece gives to texts.

Run it in an environment with the packages `gguf` and `sentencepiece`, giving it a text to learn pieces from:

    python scripts/make_gguf_fixtures.py README.md tests/weights
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]
import numpy as np
import sentencepiece  # pyright: ignore[reportMissingImports]

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BLOCKS = 3
TEXTS = (
    "Training a model",
    " two  spaces and\ttabs\n",
    "the the thethe",
    "naïve 123 → 漢字 🙂",
    "jaxtrain train configs/quickstart.yaml model.layers=3",
    "",
)


def blocks() -> dict[str, np.ndarray]:
    """Returns the blocks and the expected elements of each type."""
    rng = np.random.default_rng(13)
    arrays = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        # Scales of real sizes: random bytes would be infinite or too small to tell apart. One is negative.
        scales = np.array([[0.0123, 0.51], [-3.7, 0.002], [6e-8, 11.0]], np.float16).view(np.uint8)
        if name == "Q6_K":
            blocks[:, -2:] = scales[:, :2]
        elif name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            blocks[:, :4] = scales
        else:
            blocks[:, :2] = scales[:, :2]
        arrays[f"{name}_blocks"] = blocks
        arrays[f"{name}_expected"] = gguf.dequantize(blocks, kind)
    return arrays


def pieces(text: Path) -> dict:
    """Returns a vocabulary with its scores and kinds, and ids of texts; with and without a space before each text."""
    found = {}
    for prefix in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            sentencepiece.SentencePieceTrainer.Train(
                input=str(text),
                model_prefix=f"{folder}/m",
                model_type="bpe",
                vocab_size=420,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=prefix,
                split_digits=True,
                num_threads=1,
            )
            model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/m.model")
        size = model.GetPieceSize()
        kinds = [
            2 if model.IsUnknown(i) else 3 if model.IsControl(i) else 6 if model.IsByte(i) else 1 for i in range(size)
        ]
        found["with prefix" if prefix else "without prefix"] = {
            "tokens": [model.IdToPiece(i) for i in range(size)],
            "scores": [model.GetScore(i) for i in range(size)],
            "token_type": kinds,
            "ids": {text: model.EncodeAsIds(text) for text in TEXTS},
        }
    return found


def main() -> None:
    text, folder = Path(sys.argv[1]), Path(sys.argv[2])
    np.savez_compressed(folder / "gguf_blocks.npz", allow_pickle=False, **blocks())
    written = json.dumps(pieces(text), ensure_ascii=False, separators=(",", ":"))
    (folder / "gguf_pieces.json").write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
