"""ResNet, with the names of transformers and with those of torchvision.

Sources: He et al. 2015 (arXiv 1512.03385), table 1; models of 50 layers or more have bottleneck blocks.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.interop.families.family import (
    HEAD_KEYS,
    Family,
    fixed,
    ignored,
    labels_of,
    own,
    read_architecture,
    read_labels,
)
from jaxtrain.interop.formats.entries import Constant, Entry, Row
from jaxtrain.interop.formats.hub import resnet_widths
from jaxtrain.interop.formats.transforms import convolution, copy, linear

SIZES: dict[str, dict[str, Any]] = {
    "resnet18": dict(kind="resnet", stage_blocks=[2, 2, 2, 2], bottleneck=False),
    "resnet34": dict(kind="resnet", stage_blocks=[3, 4, 6, 3], bottleneck=False),
    "resnet50": dict(kind="resnet", stage_blocks=[3, 4, 6, 3], bottleneck=True),
    "resnet101": dict(kind="resnet", stage_blocks=[3, 4, 23, 3], bottleneck=True),
    "resnet152": dict(kind="resnet", stage_blocks=[3, 8, 36, 3], bottleneck=True),
}


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all keys; a model without a head leaves the number of classes to the data."""
    found = read_architecture(file, "ResNetForImageClassification", "ResNetModel")
    bottleneck, width, depths = file["layer_type"] == "bottleneck", file["embedding_size"], list(file["depths"])
    usual = resnet_widths(width, len(depths), bottleneck=bottleneck)
    if file["layer_type"] not in ("basic", "bottleneck") or list(file["hidden_sizes"]) != usual:
        raise ConfigError(
            f"config.json has layer_type: {file['layer_type']} and hidden_sizes: {file['hidden_sizes']}; the family "
            f"resnet knows basic and bottleneck, and {usual} for its embedding_size and depths"
        )
    classes = None if found == "ResNetModel" else read_labels(file)
    return dict(stage_blocks=depths, bottleneck=bottleneck, width=width, stem="imagenet", num_classes=classes)


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    depths, bottleneck, width = list(model["stage_blocks"]), bool(model["bottleneck"]), int(model["width"])
    return dict(
        num_channels=3,
        embedding_size=width,
        hidden_sizes=resnet_widths(width, len(depths), bottleneck=bottleneck),
        depths=depths,
        layer_type="bottleneck" if bottleneck else "basic",
        hidden_act="relu",
        downsample_in_first_stage=False,
        downsample_in_bottleneck=False,
        **labels_of(model["num_classes"]),
    )


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """The names of transformers, which are written, and those of torchvision."""
    width, bottleneck = int(model["width"]), bool(model["bottleneck"])
    stem = (("resnet.embedder.embedder.convolution", "conv1"), ("resnet.embedder.embedder.normalization", "bn1"))
    rows = _normed(("stem", "stem_norm"), stem, (7, 3, width), None)
    inputs = width
    for stage, blocks in enumerate(model["stage_blocks"]):
        inner = width * 2**stage
        outputs = inner * (4 if bottleneck else 1)
        rows += _stage(stage, int(blocks), inputs, inner, outputs)
        inputs = outputs
    if model["num_classes"] is None:
        return rows
    classes = int(model["num_classes"])
    return (
        *rows,
        Entry("head_kernel", ("classifier.1.weight", "fc.weight"), linear((inputs,), (classes,))),
        Entry("head_bias", ("classifier.1.bias", "fc.bias"), copy(classes)),
    )


def _stage(stage: int, blocks: int, inputs: int, inner: int, outputs: int) -> tuple[Row, ...]:
    """The rows of a stage: of its first block, and of the others, which are stacked."""
    theirs, torchvision = f"resnet.encoder.stages.{stage}.layers.{{layer}}", f"layer{stage + 1}.{{layer}}"
    rows: tuple[Row, ...] = ()
    for which, layers, channels in (("first", None, inputs), ("rest", range(1, blocks), outputs)):
        shapes = ((3, channels, inner), (3, inner, outputs))
        if inner != outputs:
            shapes = ((1, channels, inner), (3, inner, inner), (1, inner, outputs))
        for index, shape in enumerate(shapes):
            part = f"{theirs}.layer.{index}"
            names = (
                (f"{part}.convolution", f"{torchvision}.conv{index + 1}"),
                (f"{part}.normalization", f"{torchvision}.bn{index + 1}"),
            )
            ours = f"stage{stage}_{which}"
            rows += _normed((f"{ours}/convs/{index}", f"{ours}/norms/{index}"), names, shape, layers)
    if inputs != outputs or stage > 0:
        part, other, ours = f"{theirs}.shortcut", f"{torchvision}.downsample", f"stage{stage}_first/shortcut"
        names = ((f"{part}.convolution", f"{other}.0"), (f"{part}.normalization", f"{other}.1"))
        rows += _normed((ours, f"{ours}_norm"), names, (1, inputs, outputs), None)
    return rows


def _normed(
    ours: tuple[str, str], theirs: tuple[tuple[str, ...], ...], shape: tuple[int, int, int], layers: range | None
) -> tuple[Row, ...]:
    """The rows of a convolution and of the batch norm after it.

    Args:
        ours: Our paths of the two.
        theirs: Names of the two, each of transformers and of torchvision, with {layer}.
        shape: Side of the kernel, inputs and outputs.
        layers: What {layer} is where our parameters are stacked over it; None: they are not, and it is 0.
    """
    side, inputs, outputs = shape
    if layers is not None and not layers:
        return ()
    stack, first = ((), 0) if layers is None else ((len(layers),), layers.start)

    def row(at: int, part: str, word: str, *, state: bool = False) -> Entry:
        names = (f"{one}.{word}" for one in theirs[at])
        names = tuple(name.format(layer=0) if layers is None else name for name in names)
        transform = copy(outputs) if at else convolution(outputs, inputs, side, side)
        return Entry(f"{ours[at]}/{part}", names, transform, stack, state, first)

    # How many batches the running statistics saw; momentum does not depend on it here.
    tracked = (
        Constant(tuple(f"{one}.num_batches_tracked".format(layer=layer) for one in theirs[1]), 0, (), "int64")
        for layer in layers or range(1)
    )
    statistics = (row(1, "mean", "running_mean", state=True), row(1, "variance", "running_var", state=True))
    return (row(0, "kernel", "weight"), row(1, "scale", "weight"), row(1, "bias", "bias"), *statistics, *tracked)


FAMILY = Family(
    name="resnet",
    architecture="ResNetForImageClassification",
    keys=(
        own("embedding_size", 64),
        own("hidden_sizes", [256, 512, 1024, 2048]),
        own("depths", [3, 4, 6, 3]),
        own("layer_type", "bottleneck"),
        fixed("num_channels", 3),
        fixed("hidden_act", "relu"),
        fixed("downsample_in_first_stage", False),
        fixed("downsample_in_bottleneck", False),
        *ignored("out_features", "out_indices", "stage_names"),
        *HEAD_KEYS,
    ),
    tensors=_tensors,
    fixed=dict(kind="resnet"),
    read=_read,
    write=_write,
    sizes=SIZES,
)
