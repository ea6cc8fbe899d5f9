"""Images of published models, as transformers makes numbers of them (scripts/make_image_fixtures.py)."""

import json
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from jaxtrain.data.sources.published_images import process_image, published_images
from jaxtrain.errors import ConfigError
from jaxtrain.interop.families.vit import PROCESSOR_FILE, read_image_processing

MADE = np.load(Path(__file__).with_name("published_images.npz"))
CASES = [name.split("/")[1:] for name in MADE.files if name.startswith("made/")]
WHOLE = {
    "image_processor_type": "ViTImageProcessor", "size": 8, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def processing_of(folder, config):
    (folder / PROCESSOR_FILE).write_text(config if isinstance(config, str) else json.dumps(config))
    return read_image_processing(folder)


@pytest.mark.parametrize(("name", "image"), CASES, ids=["-".join(case) for case in CASES])
def test_the_numbers_are_those_of_transformers(tmp_path, name, image):
    processing = processing_of(tmp_path, str(MADE[f"config/{name}"]))
    Image.fromarray(MADE[f"image/{image}"]).save(tmp_path / "image.png")
    # The pixels are the same; transformers multiplies and divides them in another order.
    expected = MADE[f"made/{name}/{image}"]
    # The fixture is of Pillow 13; Pillow 12, which trackio asks for, rounds some pixels to the level beside.
    level = (
        0.0 if int(PIL.__version__.partition(".")[0]) >= 13 else 1.001 * processing.scale / min(processing.deviation)
    )
    found = process_image(tmp_path / "image.png", processing)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 + level)


def test_older_files_name_a_size_alone(tmp_path):
    """One number is both sides for a ViT and the shorter edge for a ConvNeXT; pixels are divided by 255."""
    Image.new("L", (20, 10), 255).save(tmp_path / "white.png")
    old = {**WHOLE, "feature_extractor_type": "ViTFeatureExtractor"}
    del old["image_processor_type"]
    rows = published_images([tmp_path / "white.png"] * 2, processing_of(tmp_path, old))
    assert (len(rows), rows[1]["inputs"].shape, rows[1]["inputs"].dtype) == (2, (8, 8, 3), np.float32)
    assert (rows[1]["inputs"] == 1).all()
    resnet = {**WHOLE, "image_processor_type": "ConvNextFeatureExtractor", "size": 400}
    squeezed = processing_of(tmp_path, resnet)
    assert (squeezed.size, squeezed.crop) == ((400, 400), None)  # from 384 on nothing is cut off
    assert read_image_processing(tmp_path / "none") is None


WRONG = {
    "another kind": ({**WHOLE, "image_processor_type": "OwlViTImageProcessor"}, "image_processor_type"),
    "no size": ({**WHOLE, "size": None}, "size is null"),
    "padding": ({**WHOLE, "do_pad": True}, "do_pad is true"),
}


@pytest.mark.parametrize(("config", "said"), WRONG.values(), ids=WRONG)
def test_what_is_not_known_is_one_line(tmp_path, config, said):
    with pytest.raises(ConfigError, match=said) as raised:
        processing_of(tmp_path, config)
    assert "\n" not in str(raised.value)
