"""PyTorch on a GPU in bfloat16, `torch.compile`: a Llama with flash attention, or ResNet-50; prints a JSON object.

python scripts/peers/torch_gpu.py llama|resnet50 [--rows N] [--seconds S] [--rehearse]
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import argparse
import contextlib
import json
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_transformer import adamw

# Llama 3.2 1B: layers, width, heads, key-value heads, width of the MLP, vocabulary, tokens of a row.
LLAMA, TINY = (16, 2048, 32, 8, 8192, 128_256, 4096), (1, 32, 2, 1, 64, 64, 16)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, mlp: int):
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * mlp, bias=False), nn.Linear(mlp, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, self.head).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.groups, self.groups), 1)
        q, k = (torch.cat((-y[..., self.head // 2 :], y[..., : self.head // 2]), -1) * sin + y * cos for y in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, groups: int, mlp: int, vocabulary: int, length: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=0.02)
        head = width // heads
        angles = torch.outer(torch.arange(length), 500_000.0 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, tokens):
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return functional.linear(self.norm(x), self.embedding.weight)


def made(work: str, rows: int, device: str, *, tiny: bool) -> tuple[nn.Module, torch.optim.Optimizer, list, int]:
    """Make the model, its optimizer, inputs with targets, and the tokens or images of a step."""
    if work == "llama":
        sizes = TINY if tiny else LLAMA
        model = Llama(*sizes).to(device)
        batch = [torch.randint(0, sizes[5], (rows, sizes[6]), device=device) for _ in range(2)]
        return model, adamw(model), batch, rows * sizes[6]
    import torchvision

    side = 32 if tiny else 224
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    images = torch.randn(rows, 3, side, side, device=device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, [images, torch.randint(0, 1000, (rows,), device=device)], rows


def measured(work: str, rows: int, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Time steps, each of which is waited for, after three that compile and warm up."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, optimizer, (inputs, targets), units = made(work, rows, device, tiny=tiny)

    def loss_of(inputs, targets):
        with torch.autocast(device, dtype=torch.bfloat16):
            outputs = model(inputs)
        return functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())

    run = loss_of if tiny else torch.compile(loss_of)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        run(inputs, targets).backward()
        if work == "llama":  # as the configs of the two say
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    began = time.perf_counter()
    for _ in range(3):
        step()
    compile_seconds, times = time.perf_counter() - began, []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 50):
        times.append(step())
    median = statistics.median(times)
    answer = {"rows": rows, "seconds": median, "units_per_second": units / median, "compile_seconds": compile_seconds}
    answer["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    answer["peak_memory_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return answer | {"versions": f"torch {torch.__version__}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("llama", "resnet50"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on the CPU if there is no GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.rehearse:
        raise SystemExit("PyTorch sees no GPU")
    torch.manual_seed(0)
    # cuDNN's flash attention is the fastest on Hopper; never the one that keeps all scores.
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    answer: dict[str, Any] = {}
    for rows in (arguments.rows, arguments.rows // 2):
        # Half of the rows where they do not fit: the figures are per second.
        with sdpa_kernel(kernels, set_priority=True), contextlib.suppress(torch.OutOfMemoryError):
            answer = measured(arguments.work, rows, arguments.seconds, tiny=arguments.rehearse)
            break
    if not answer:
        raise SystemExit(f"{rows} rows are too many for the memory")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
