"""The same transformer in PyTorch: SDPA, fused AdamW, eager or `torch.compile`.

python scripts/peers/torch_transformer.py eager|compile
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import os
import sys
from dataclasses import dataclass

import peer
import torch
from peer import B1, B2, CLIP, EPSILON, LEARNING_RATE, NORM_EPSILON, WEIGHT_DECAY, serve, steps, values
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT-2 style transformer, and whether it has biases and tied embeddings."""

    layers: int = peer.LAYERS
    width: int = peer.WIDTH
    heads: int = peer.HEADS
    length: int = peer.LENGTH
    vocabulary: int = peer.VOCABULARY
    bias: bool = False
    tied: bool = False


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        width, bias = sizes.width, sizes.bias
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPSILON, bias=bias)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPSILON, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)
        self.heads = sizes.heads

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.length, sizes.width))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, eps=NORM_EPSILON, bias=sizes.bias)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.output.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * sizes.layers) ** 0.5 if small else 0.02)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW in one kernel, with weight decay of matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(B1, B2), eps=EPSILON, fused=True)


def given(model: Transformer) -> None:
    """Set the parameters of the model to the given values."""
    ours = {path: torch.from_numpy(value) for path, value in values().items()}

    def fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
        parameter.copy_(value.reshape(parameter.shape))

    with torch.no_grad():
        fill(model.embedding.weight, ours["embedding"])
        fill(model.positions, ours["positions"])
        fill(model.norm.weight, ours["output_norm/scale"])
        fill(model.output.weight, ours["output"].T)
        for number, block in enumerate(model.blocks):
            own = {path.removeprefix("blocks/"): value[number] for path, value in ours.items() if "blocks/" in path}
            width = own["attention_norm/scale"].numel()
            rows = [own[f"attention/{name}/kernel"].reshape(width, width).T for name in ("query", "key", "value")]
            fill(block.qkv.weight, torch.cat(rows))
            fill(block.out.weight, own["attention/output/kernel"].reshape(width, width).T)
            fill(block.up.weight, own["mlp/up/kernel"].T)
            fill(block.down.weight, own["mlp/down/kernel"].T)
            fill(block.norm1.weight, own["attention_norm/scale"])
            fill(block.norm2.weight, own["mlp_norm/scale"])


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the step that comes."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def main(*, compiled: bool) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = Transformer(Sizes())
    given(model)
    optimizer = adamw(model)

    def loss_of(inputs, targets):
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of
    given_steps = steps()

    def run(steps: int) -> float:
        losses = []
        for _ in range(steps):
            batch, rate = next(given_steps)
            inputs, targets = (torch.from_numpy(batch[name]).long() for name in ("inputs", "targets"))
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    serve(run, parameters=sum(p.numel() for p in model.parameters()), versions=f"torch {torch.__version__}")


if __name__ == "__main__":
    main(compiled=sys.argv[1] == "compile")
