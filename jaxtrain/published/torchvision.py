"""ResNet files with the names of torchvision have no config.json: their tensors say what it would be. No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.published.transforms import Shape

# Width of a bottleneck block's output, in widths of its convolution in the middle.
WIDER = 4


def stage_outputs(width: int, stages: int, *, bottleneck: bool) -> list[int]:
    """Returns the channels that each stage of a ResNet gives.

    Args:
        width: Channels of the first convolution.
        stages: Number of stages; each doubles the width.
        bottleneck: Whether blocks widen their output.
    """
    return [width * 2**stage * (WIDER if bottleneck else 1) for stage in range(stages)]


def torchvision_config(tensors: Mapping[str, Shape]) -> dict[str, Any] | None:
    """Returns the config.json of a file with torchvision's names, which has none; or None for other names.

    Args:
        tensors: Name -> shape.
    """
    if "conv1.weight" not in tensors or "layer1.0.conv1.weight" not in tensors:
        return None
    depths: list[int] = []
    while f"layer{len(depths) + 1}.0.conv1.weight" in tensors:
        stage, blocks = len(depths) + 1, 0
        while f"layer{stage}.{blocks}.conv1.weight" in tensors:
            blocks += 1
        depths.append(blocks)
    bottleneck, width = "layer1.0.conv3.weight" in tensors, tensors["conv1.weight"][0]
    found: dict[str, Any] = dict(
        architectures=["ResNetForImageClassification" if "fc.weight" in tensors else "ResNetModel"],
        model_type="resnet",
        embedding_size=width,
        hidden_sizes=stage_outputs(width, len(depths), bottleneck=bottleneck),
        depths=depths,
        layer_type="bottleneck" if bottleneck else "basic",
    )
    return found | (dict(num_labels=tensors["fc.weight"][0]) if "fc.weight" in tensors else {})
