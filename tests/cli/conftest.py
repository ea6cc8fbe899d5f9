"""Two tiny runs that the commands work on."""

from pathlib import Path

import pytest

from jaxtrain.cli import main

TEXT_RUN = [
    "data.tokenizer.kind=byte",
    "model.num_layers=2",
    "model.embed_dim=32",
    "model.num_heads=2",
    "model.mlp_dim=64",
    "model.max_sequence_length=32",
    "optimizer.schedule.warmup_steps=1",
    "optimizer.learning_rate=0.03",  # so that four steps tell one checkpoint's text from another's
    "train.steps=4",
    "train.global_batch_size=8",
    "evaluation.max_batches=2",
    "evaluation.sample_prompt=null",
    "checkpoint.every=2",
    "logging.report=false",
    "logging.tensorboard=false",
]
# A model with batch statistics whose run keeps a moving average of the parameters.
IMAGE_CONFIG = """
name: images
task: classification
model: {kind: resnet, stem: small, stage_blocks: [1], width: 4}
data: {kind: synthetic, task: images, num_rows: 64, image_size: 8}
optimizer: {kind: sgd, learning_rate: 0.1, ema_decay: 0.5}
train: {steps: 2, global_batch_size: 16}
logging: {report: false, tensorboard: false}
"""


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> Path:
    """A finished run of a small transformer on bytes, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "text"
    assert main(["train", "quickstart", *TEXT_RUN, "--run-dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def image_run(tmp_path_factory) -> Path:
    """A finished run of a small ResNet with a moving average."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "images.yaml").write_text(IMAGE_CONFIG)
    assert main(["train", str(folder / "images.yaml"), "--run-dir", str(folder / "images")]) == 0
    return folder / "images"
