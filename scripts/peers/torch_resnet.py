"""ResNets in PyTorch like torchvision's, with the stride in the 3x3 convolution, trained by SGD with momentum.

python scripts/peers/torch_resnet.py eager|compile resnet18|resnet50
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import os
import sys

import torch
from peer import MOMENTUM, serve, steps, values
from torch import nn
from torch.nn import functional
from torch_transformer import set_rate


def convolve(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution without bias, and its batch norm."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1 ones, whose output is added to a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int, *, bottleneck: bool):
        super().__init__()
        outputs = 4 * inner if bottleneck else inner
        if bottleneck:
            parts = [convolve(inputs, inner, 1), convolve(inner, inner, 3, stride), convolve(inner, outputs, 1)]
        else:
            parts = [convolve(inputs, inner, 3, stride), convolve(inner, outputs, 3)]
        self.parts = nn.ModuleList(parts)
        changes = inputs != outputs or stride != 1
        self.shortcut = convolve(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        y = x
        for part in self.parts[:-1]:
            y = functional.relu(part(y))
        return functional.relu(self.parts[-1](y) + self.shortcut(x))


def resnet(counts: tuple[int, ...], *, bottleneck: bool, channels: int, classes: int, small: bool) -> nn.Sequential:
    """Make a ResNet of width 64.

    Args:
        counts: blocks of each stage.
        bottleneck: whether blocks have three convolutions.
        channels: of an image.
        classes: number of outputs.
        small: whether the stem is a 3x3 convolution, without max-pooling.
    """
    stem = [convolve(channels, 64, 3)] if small else [convolve(channels, 64, 7, 2)]
    layers: list[nn.Module] = [*stem, nn.ReLU(), *([] if small else [nn.MaxPool2d(3, 2, 1)])]
    width = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            inner, stride = 64 * 2**stage, 2 if stage and not index else 1
            layers.append(Block(width, inner, stride, bottleneck=bottleneck))
            width = 4 * inner if bottleneck else inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def resnet50() -> nn.Sequential:
    """Make a ResNet-50 for the images of ImageNet."""
    return resnet((3, 4, 6, 3), bottleneck=True, channels=3, classes=1000, small=False)


def resnet18() -> nn.Sequential:
    """Make a ResNet-18 for handwritten digits of 8x8 pixels."""
    return resnet((2, 2, 2, 2), bottleneck=False, channels=1, classes=10, small=True)


def given(model: nn.Sequential) -> None:
    """Set the parameters of the model to the given values."""
    ours = {path: torch.from_numpy(value) for path, value in values().items()}

    def fill(part: nn.Module, kernel: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> None:
        convolution, norm = part.children()
        convolution.weight.copy_(kernel.permute(3, 2, 0, 1))
        norm.weight.copy_(scale)
        norm.bias.copy_(bias)

    with torch.no_grad():
        fill(model[0], ours["stem/kernel"], ours["stem_norm/scale"], ours["stem_norm/bias"])
        blocks = iter([layer for layer in model if isinstance(layer, Block)])
        for stage in range(4):
            own = {path: value for path, value in ours.items() if path.startswith(f"stage{stage}_")}
            rest = {path: value for path, value in own.items() if "_rest/" in path}
            first = {path: value for path, value in own.items() if path not in rest}
            count = len(next(iter(rest.values())))
            for one in (first, *({path: value[i] for path, value in rest.items()} for i in range(count))):
                block = next(blocks)
                tail = {path.partition("/")[2]: value for path, value in one.items()}
                for number, part in enumerate(block.parts):
                    names = (f"convs/{number}/kernel", f"norms/{number}/scale", f"norms/{number}/bias")
                    fill(part, *(tail[name] for name in names))
                if not isinstance(block.shortcut, nn.Identity):
                    names = ("shortcut/kernel", "shortcut_norm/scale", "shortcut_norm/bias")
                    fill(block.shortcut, *(tail[name] for name in names))
        model[-1].weight.copy_(ours["head_kernel"].T)
        model[-1].bias.copy_(ours["head_bias"])


def main(name: str, *, compiled: bool) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = resnet50() if name == "resnet50" else resnet18()
    given(model)
    # Channels last is the faster layout on CPUs and on tensor cores.
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=MOMENTUM, nesterov=False)

    def loss_of(inputs, targets):
        return functional.cross_entropy(model(inputs), targets)

    loss_of = torch.compile(loss_of) if compiled else loss_of
    given_steps = steps()

    def run(steps: int) -> float:
        losses = []
        for _ in range(steps):
            given_batch, rate = next(given_steps)
            batch = torch.from_numpy(given_batch["inputs"]).permute(0, 3, 1, 2)  # a view: memory stays channels last
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(batch, torch.from_numpy(given_batch["targets"]).long())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=f"torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[2], compiled=sys.argv[1] == "compile")
