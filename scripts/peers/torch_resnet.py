"""ResNet-50 in PyTorch like torchvision's, with the stride in the 3x3 convolution, trained by SGD with momentum.

python scripts/peers/torch_resnet.py eager|compile
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import os
import sys

import torch
from peer import CLASSES, MOMENTUM, RATE, images, serve
from torch import nn
from torch.nn import functional


def convolve(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution without bias, and its batch norm."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, stride: int):
        super().__init__()
        self.first, self.second = convolve(inputs, inner, 1), convolve(inner, inner, 3, stride)
        self.third = convolve(inner, 4 * inner, 1)
        changes = inputs != 4 * inner or stride != 1
        self.shortcut = convolve(inputs, 4 * inner, 1, stride) if changes else nn.Identity()

    def forward(self, x):
        y = functional.relu(self.second(functional.relu(self.first(x))))
        return functional.relu(self.third(y) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    layers: list[nn.Module] = [convolve(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            layers.append(Bottleneck(width, 64 * 2**stage, 2 if stage and not index else 1))
            width = 4 * 64 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def main(*, compiled: bool) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    # Channels last is the faster layout on CPUs and on tensor cores.
    model = resnet50().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=False)

    def loss_of(inputs, targets):
        return functional.cross_entropy(model(inputs), targets)

    loss_of = torch.compile(loss_of) if compiled else loss_of
    rows = images()

    def run(steps: int) -> float:
        loss = torch.tensor(float("nan"))
        for _ in range(steps):
            inputs, targets = next(rows)
            batch = torch.from_numpy(inputs).permute(0, 3, 1, 2)  # a view: memory stays channels last
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(batch, torch.from_numpy(targets).long())
            loss.backward()
            optimizer.step()
        return loss.item()

    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=f"torch {torch.__version__}")


if __name__ == "__main__":
    main(compiled=sys.argv[1] == "compile")
