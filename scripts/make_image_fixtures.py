"""What transformers' image processors (with Pillow) make of small images: tests/data/published_images.npz.

    ORACLE/bin/python scripts/make_image_fixtures.py

ORACLE is an environment with `pip install 'jaxtrain[oracle]' pillow`. The file holds the pixels of each image, the
preprocessor_config.json of each processor, and the numbers that it makes of each image, float32 [height, width, 3].
"""

# Its imports are installed in the environment of the oracle only.
# pyright: reportMissingImports=false
import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"wide": (23, 37), "tall": (41, 20), "square": (32, 32)}
CHANNELS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUARE = {"height": 8, "width": 8}
# Name -> kind and settings.
PROCESSORS = {
    "a square": ("ViT", {"size": SQUARE}),
    "height and width": ("ViT", {"size": {"height": 8, "width": 6}, "resample": 3}),
    "pixels of 0 to 255": ("ViT", {"size": SQUARE, "do_rescale": False}),
    "a share of the edge": ("ConvNext", {"size": {"shortest_edge": 8}, "crop_pct": 0.875, "resample": 3}),
    "a crop of another shape": ("CLIP", {"size": {"shortest_edge": 10}, "crop_size": {"height": 7, "width": 8}}),
    "edge and crop": ("Bit", {"size": {"shortest_edge": 10}, "crop_size": SQUARE}),
}


def main() -> None:
    """Write the file."""
    import transformers
    from PIL import Image

    drawn = np.random.default_rng(0)
    images = {name: drawn.integers(0, 256, (*shape, 3), dtype=np.uint8) for name, shape in SHAPES.items()}
    found: dict[str, np.ndarray] = {f"image/{name}": pixels for name, pixels in images.items()}
    for name, (kind, settings) in PROCESSORS.items():
        processor = getattr(transformers, f"{kind}ImageProcessorPil")(**settings, **CHANNELS)
        found[f"config/{name}"] = np.array(json.dumps(processor.to_dict()))
        for image, pixels in images.items():
            made = processor(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
            found[f"made/{name}/{image}"] = np.ascontiguousarray(made.transpose(1, 2, 0))
    np.savez_compressed(ROOT / "tests" / "data" / "published_images.npz", **found)  # pyright: ignore[reportArgumentType] names and arrays


if __name__ == "__main__":
    main()
