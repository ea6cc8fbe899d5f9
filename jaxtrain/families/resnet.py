"""ResNet. No jax here.

Sources: He et al. 2015 (arXiv 1512.03385), table 1; models of 50 layers or more have bottleneck blocks.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.families.family import (
    HEAD_KEYS,
    Family,
    checked,
    fixed,
    ignored,
    labels_of,
    own,
    read_architecture,
    read_labels,
)
from jaxtrain.formats.rows import Constant, Entry, Row, convolution, copy, linear

_SAME = dict(num_channels=3, hidden_act="relu", downsample_in_first_stage=False, downsample_in_bottleneck=False)


def _size(*blocks: int, bottleneck: bool = True) -> dict[str, Any]:
    return dict(kind="resnet", stage_blocks=list(blocks), bottleneck=bottleneck)


def _widths(width: int, stages: int, *, bottleneck: bool) -> list[int]:
    """The channels that each stage gives; the first convolution gives `width`."""
    return [width * 2**stage * (4 if bottleneck else 1) for stage in range(stages)]


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys; a model without a head leaves the number of classes to the data."""
    found = read_architecture(file, "ResNetForImageClassification", "ResNetModel")
    classes = None if found == "ResNetModel" else read_labels(file)
    bottleneck, width = file["layer_type"] == "bottleneck", file["embedding_size"]
    stages = list(file["depths"])
    return dict(stage_blocks=stages, bottleneck=bottleneck, width=width, stem="imagenet", num_classes=classes)


def _usual_widths(file: Mapping[str, Any]) -> tuple[list[int]]:
    return (_widths(file["embedding_size"], len(file["depths"]), bottleneck=file["layer_type"] == "bottleneck"),)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    depths, bottleneck, width = list(model["stage_blocks"]), bool(model["bottleneck"]), int(model["width"])
    return dict(
        embedding_size=width,
        hidden_sizes=_widths(width, len(depths), bottleneck=bottleneck),
        depths=depths,
        layer_type="bottleneck" if bottleneck else "basic",
        **_SAME,
        **labels_of(model["num_classes"]),
    )


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    width, bottleneck = int(model["width"]), bool(model["bottleneck"])
    stem = "resnet.embedder.embedder"
    rows = _normed(("stem", "stem_norm"), stem, (7, 3, width))
    inputs = width
    for stage, blocks in enumerate(model["stage_blocks"]):
        inner = width * 2**stage
        outputs = inner * (4 if bottleneck else 1)
        rows += _stage(stage, int(blocks), inputs, inner, outputs)
        inputs = outputs
    if model["num_classes"] is None:
        return tuple(rows)
    classes = int(model["num_classes"])
    head = Entry("head_kernel", "classifier.1.weight", linear((inputs,), (classes,)))
    return (*rows, head, Entry("head_bias", "classifier.1.bias", copy(classes)))


def _stage(stage: int, blocks: int, inputs: int, inner: int, outputs: int) -> list[Row]:
    """The rows of a stage: of its first block, and of the others, which are stacked."""
    theirs, rows = f"resnet.encoder.stages.{stage}.layers.{{layer}}", []
    for which, layers, channels in (("first", None, inputs), ("rest", range(1, blocks), outputs)):
        shapes = ((3, channels, inner), (3, inner, outputs))
        if inner != outputs:
            shapes = ((1, channels, inner), (3, inner, inner), (1, inner, outputs))
        ours = f"stage{stage}_{which}"
        for index, shape in enumerate(shapes):
            paths = (f"{ours}/convs/{index}", f"{ours}/norms/{index}")
            rows += _normed(paths, f"{theirs}.layer.{index}", shape, layers)
    if inputs != outputs or stage > 0:
        ours = f"stage{stage}_first/shortcut"
        rows += _normed((ours, f"{ours}_norm"), f"{theirs}.shortcut", (1, inputs, outputs))
    return rows


def _normed(ours: tuple[str, str], theirs: str, shape: tuple[int, int, int], layers: range | None = None) -> list[Row]:
    """The rows of a convolution and of the batch norm after it."""
    side, inputs, outputs = shape
    if layers is not None and not layers:
        return []
    stack, first = ((), 0) if layers is None else ((len(layers),), layers.start)
    theirs = theirs.format(layer=0) if layers is None else theirs
    norm = {"scale": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}
    kernel = convolution(outputs, inputs, side, side)
    return [
        Entry(f"{ours[0]}/kernel", f"{theirs}.convolution.weight", kernel, stack, False, first),
        *(
            Entry(f"{ours[1]}/{one}", f"{theirs}.normalization.{name}", copy(outputs), stack, "running" in name, first)
            for one, name in norm.items()
        ),
        # How many batches the running statistics saw; momentum does not depend on it here.
        *(
            Constant(f"{theirs}.normalization.num_batches_tracked".format(layer=layer), 0, (), "int64")
            for layer in layers or range(1)
        ),
    ]


FAMILY = Family(
    name="resnet",
    architecture="ResNetForImageClassification",
    keys=(
        own("embedding_size", 64),
        own("depths", [3, 4, 6, 3]),
        fixed("layer_type", "bottleneck", "basic"),
        checked("hidden_sizes", [256, 512, 1024, 2048], _usual_widths),
        *(fixed(name, value) for name, value in _SAME.items()),
        *ignored("out_features", "out_indices", "stage_names"),
        *HEAD_KEYS,
    ),
    tensors=_tensors,
    fixed=dict(kind="resnet"),
    read=_read,
    write=_write,
    sizes={
        "resnet18": _size(2, 2, 2, 2, bottleneck=False),
        "resnet34": _size(3, 4, 6, 3, bottleneck=False),
        "resnet50": _size(3, 4, 6, 3),
        "resnet101": _size(3, 4, 23, 3),
        "resnet152": _size(3, 8, 36, 3),
    },
)
