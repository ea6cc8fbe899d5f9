"""PyTorch on a GPU: GPT-2 124M or ResNet-50 in bfloat16, `torch.compile`; prints one JSON object.

python scripts/peers/torch_gpu.py gpt2|resnet50 [--rows N] [--smoke]
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import argparse
import json
import statistics
import time

import torch
from torch.nn import functional
from torch_transformer import Sizes, Transformer, adamw

_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("gpt2", "resnet50"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU if there is no GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        raise SystemExit("PyTorch sees no GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = 2 if arguments.smoke else arguments.rows
    if arguments.work == "gpt2":
        sizes = Sizes(1, 32, 2, 16, 64) if arguments.smoke else Sizes(12, 768, 12, 1024, 50257, bias=True, tied=True)
        model = Transformer(sizes).to(device)
        inputs = torch.randint(0, sizes.vocabulary, (rows, sizes.length), device=device)
        targets, items = torch.randint(0, sizes.vocabulary, inputs.shape, device=device), sizes.length
        optimizer = adamw(model)
    else:
        import torchvision

        side = 32 if arguments.smoke else 224
        model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
        inputs = torch.randn(rows, 3, side, side, device=device).to(memory_format=torch.channels_last)
        targets, items = torch.randint(0, 1000, (rows,), device=device), 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_of(inputs, targets):
        with torch.autocast(device, dtype=torch.bfloat16):
            outputs = model(inputs)
        return functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())

    run = loss_of if arguments.smoke else torch.compile(loss_of)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        run(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(1 if arguments.smoke else 5):
        step()
    seconds = []
    for _ in range(2 if arguments.smoke else _STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    answer = {"seconds": median, "units_per_second": rows * items / median, "versions": f"torch {torch.__version__}"}
    answer["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if device == "cuda":
        answer["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
