"""ResNet, with the names of transformers and with those of torchvision. No jax here.

Sources: He et al. 2015 (arXiv 1512.03385), table 1; models of 50 layers or more have bottleneck blocks.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.published.entries import Constant, Entry, Row
from jaxtrain.published.family import Family
from jaxtrain.published.heads import HEAD_KEYS, read_labels
from jaxtrain.published.keys import Fixed, Ignored, Own, read_keys
from jaxtrain.published.torchvision import WIDER, stage_outputs
from jaxtrain.published.transforms import Shape, convolution, copy, linear

SIZES: dict[str, dict[str, Any]] = {
    "resnet18": dict(kind="resnet", stage_blocks=[2, 2, 2, 2], bottleneck=False),
    "resnet34": dict(kind="resnet", stage_blocks=[3, 4, 6, 3], bottleneck=False),
    "resnet50": dict(kind="resnet", stage_blocks=[3, 4, 6, 3], bottleneck=True),
    "resnet101": dict(kind="resnet", stage_blocks=[3, 4, 23, 3], bottleneck=True),
    "resnet152": dict(kind="resnet", stage_blocks=[3, 8, 36, 3], bottleneck=True),
}

KEYS = (
    Own("embedding_size", default=64),
    Own("hidden_sizes", default=[256, 512, 1024, 2048]),
    Own("depths", default=[3, 4, 6, 3]),
    Own("layer_type", default="bottleneck"),
    Fixed("num_channels", (3,), reason="images have red, green and blue"),
    Fixed("hidden_act", ("relu",), reason="it activates with another function"),
    Fixed("downsample_in_first_stage", (False,), reason="it halves the image once more"),
    Fixed("downsample_in_bottleneck", (False,), reason="it puts the stride into the first 1x1 convolution"),
    Ignored("out_features", reason="chooses what a backbone returns"),
    Ignored("out_indices", reason="chooses what a backbone returns"),
    Ignored("stage_names", reason="names the stages"),
    *HEAD_KEYS,
)


def from_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of our model group for a config.json of this family.

    A model without a head leaves the number of classes to the data.
    """
    _, file = read_keys(KEYS, config, family="resnet")
    if file["layer_type"] not in ("basic", "bottleneck"):
        raise ConfigError(f"config.json has layer_type: {file['layer_type']}; known are basic, bottleneck")
    bottleneck, width, depths = file["layer_type"] == "bottleneck", file["embedding_size"], file["depths"]
    if list(file["hidden_sizes"]) != stage_outputs(width, len(depths), bottleneck=bottleneck):
        raise ConfigError(
            f"config.json has hidden_sizes: {file['hidden_sizes']}, but the family resnet supports only "
            f"{stage_outputs(width, len(depths), bottleneck=bottleneck)} for its embedding_size and depths"
        )
    architecture = next(iter(file["architectures"] or ()), "ResNetModel")
    if architecture not in ("ResNetForImageClassification", "ResNetModel"):
        raise ConfigError(
            f"config.json has architectures: {architecture}, which is not supported; known are "
            "ResNetForImageClassification, ResNetModel"
        )
    classes = read_labels(file) if architecture == "ResNetForImageClassification" else None
    return dict(
        kind="resnet",
        stage_blocks=list(depths),
        bottleneck=bottleneck,
        width=width,
        stem="imagenet",
        num_classes=classes,
    )


def to_published(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model group."""
    depths, bottleneck, width = list(model["stage_blocks"]), bool(model["bottleneck"]), int(model["width"])
    classes = range(model["num_classes"] or 0)
    return dict(
        architectures=["ResNetForImageClassification"],
        model_type="resnet",
        num_channels=3,
        embedding_size=width,
        hidden_sizes=stage_outputs(width, len(depths), bottleneck=bottleneck),
        depths=depths,
        layer_type="bottleneck" if bottleneck else "basic",
        hidden_act="relu",
        downsample_in_first_stage=False,
        downsample_in_bottleneck=False,
        id2label={str(label): f"LABEL_{label}" for label in classes},
        label2id={f"LABEL_{label}": label for label in classes},
    )


def tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    """Returns the name table of a model group: the names of transformers, which are written, and of torchvision."""
    width, bottleneck = int(model["width"]), bool(model["bottleneck"])
    stem = ("resnet.embedder.embedder.convolution", "conv1"), ("resnet.embedder.embedder.normalization", "bn1")
    rows = _normed("stem", "stem_norm", *stem, convolution(width, 3, 7, 7).ours)
    inputs = width
    for stage, blocks in enumerate(model["stage_blocks"]):
        inner = width * 2**stage
        outputs = inner * (WIDER if bottleneck else 1)
        rows += _stage(stage, int(blocks), inputs, inner, outputs, bottleneck=bottleneck)
        inputs = outputs
    if model["num_classes"] is None:
        return rows
    classes = int(model["num_classes"])
    return (
        *rows,
        Entry("head_kernel", ("classifier.1.weight", "fc.weight"), linear((inputs,), (classes,))),
        Entry("head_bias", ("classifier.1.bias", "fc.bias"), copy(classes)),
    )


def _stage(stage: int, blocks: int, inputs: int, inner: int, outputs: int, *, bottleneck: bool) -> tuple[Row, ...]:
    """The rows of a stage: of its first block, and of the others, which are stacked."""
    ours = f"stage{stage}"
    theirs, torchvision = f"resnet.encoder.stages.{stage}.layers.{{layer}}", f"layer{stage + 1}.{{layer}}"
    rows: tuple[Row, ...] = ()
    for which, count, first, channels in (("first", 1, 0, inputs), ("rest", blocks - 1, 1, outputs)):
        if bottleneck:
            shapes = ((1, channels, inner), (3, inner, inner), (1, inner, outputs))
        else:
            shapes = ((3, channels, inner), (3, inner, outputs))
        for index, (side, before, after) in enumerate(shapes):
            rows += _normed(
                f"{ours}_{which}/convs/{index}",
                f"{ours}_{which}/norms/{index}",
                (f"{theirs}.layer.{index}.convolution", f"{torchvision}.conv{index + 1}"),
                (f"{theirs}.layer.{index}.normalization", f"{torchvision}.bn{index + 1}"),
                (side, side, before, after),
                layers=range(first, first + count),
                stacked=which == "rest",
            )
    if inputs != outputs or stage > 0:
        shortcut = (f"{theirs}.shortcut.convolution", f"{torchvision}.downsample.0")
        norm = (f"{theirs}.shortcut.normalization", f"{torchvision}.downsample.1")
        rows += _normed(
            f"{ours}_first/shortcut", f"{ours}_first/shortcut_norm", shortcut, norm, (1, 1, inputs, outputs)
        )
    return rows


def _normed(
    conv: str,
    norm: str,
    conv_names: tuple[str, str],
    norm_names: tuple[str, str],
    kernel: Shape,
    *,
    layers: range = range(1),
    stacked: bool = False,
) -> tuple[Row, ...]:
    """The rows of a convolution and of the batch norm after it.

    Args:
        conv, norm: Our paths.
        conv_names, norm_names: Their names, of transformers and of torchvision, with {layer}.
        kernel: Our shape of the kernel (of one layer).
        layers: What {layer} is.
        stacked: Whether our parameters have a leading dimension of layers.
    """
    if not layers:
        return ()
    height, width, inputs, outputs = kernel
    stack, first = ((len(layers),), layers.start) if stacked else ((), 0)

    def names(prefixes: tuple[str, str], word: str) -> tuple[str, ...]:
        return tuple(f"{one}.{word}" if stacked else f"{one}.{word}".format(layer=layers.start) for one in prefixes)

    def of_norm(part: str, word: str, *, state: bool = False) -> Entry:
        return Entry(f"{norm}/{part}", names(norm_names, word), copy(outputs), stack, state, first)

    # How many batches the running statistics saw; momentum does not depend on it here.
    tracked = tuple(
        Constant(tuple(f"{one}.num_batches_tracked".format(layer=layer) for one in norm_names), 0, (), "int64")
        for layer in layers
    )
    return (
        Entry(
            f"{conv}/kernel",
            names(conv_names, "weight"),
            convolution(outputs, inputs, height, width),
            stack,
            False,
            first,
        ),
        of_norm("scale", "weight"),
        of_norm("bias", "bias"),
        of_norm("mean", "running_mean", state=True),
        of_norm("variance", "running_var", state=True),
        *tracked,
    )


FAMILY = Family(
    name="resnet",
    model_type="resnet",
    keys=KEYS,
    from_published=from_published,
    to_published=to_published,
    tensors=tensors,
    sizes=SIZES,
)
