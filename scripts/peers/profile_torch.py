"""The time of a step of the same transformer in torch.compile by kind of operation, from torch's profiler.

python scripts/peers/profile_torch.py STEPS

Prints a line of JSON. Kernels that torch.compile wrote are told apart by the operations in their names.
"""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import collections
import json
import os
import sys
import time

import torch
from peer import CLIP, steps
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function
from torch_transformer import Sizes, Transformer, adamw, given, set_rate

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkl::_mkl_linear", "mkldnn::_linear_pointwise")


def kind_of(name: str, shapes: list[list[int]], part: str, sizes: Sizes) -> str:
    """Return the row of the table for an event, by its name, the shapes of its inputs and the part of the step."""
    if part == "optimizer":
        return "optimizer, norm of the gradients"
    if "scaled_dot_product" in name:
        return f"attention between its projections, {part}"
    if name in _PRODUCTS:
        dims = {dim for shape in shapes for dim in shape}
        if 4 * sizes.width in dims:
            return f"products of the MLP, {part}"
        if sizes.vocabulary in dims:
            return "output layer and loss"
        return f"products of attention's projections, {part}"
    if "nll_loss" in name or "log_softmax" in name:
        return "output layer and loss"
    if "embedding" in name:
        return "embedding"
    if "cpp_fused" in name:
        return "norms, GELU, residuals"
    if name.startswith(("aten::copy_", "aten::clone", "aten::fill_", "aten::zero_")):
        return "slices of stacked layers, copies, zeros"
    return "rest"


def main(steps_profiled: int) -> None:
    """Profile some steps after two others."""
    import torch._inductor.config as inductor

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    inductor.cpp.enable_kernel_profile = True
    sizes = Sizes()
    model = Transformer(sizes)
    given(model)
    optimizer = adamw(model)
    loss_of = torch.compile(
        lambda inputs, targets: functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    )
    given_steps = steps()

    def run(number: int) -> float:
        batches = [next(given_steps) for _ in range(number)]
        began = time.perf_counter()
        for batch, rate in batches:
            inputs, targets = (torch.from_numpy(batch[name]).long() for name in ("inputs", "targets"))
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            with record_function("part: forward"):
                loss = loss_of(inputs, targets)
            with record_function("part: backward"):
                loss.backward()
            with record_function("part: optimizer"):
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
        return time.perf_counter() - began

    run(2)
    without = run(steps_profiled)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        seconds = run(steps_profiled)
    found = profiled.events() or []
    spans = [(one.time_range.start, one.time_range.end, one.name[6:]) for one in found if one.name.startswith("part: ")]
    rows: dict[str, float] = collections.defaultdict(float)
    for one in found:
        start = one.time_range.start
        part = next((name for begin, end, name in spans if begin <= start < end), "rest")
        if not one.name.startswith("part: "):
            rows[kind_of(one.name, one.input_shapes or [], part, sizes)] += (
                one.self_cpu_time_total / 1e3 / steps_profiled
            )
    rows["between the operations"] = seconds * 1e3 / steps_profiled - sum(rows.values())
    times = {"profiled_ms": seconds * 1e3 / steps_profiled, "plain_ms": without * 1e3 / steps_profiled}
    print(json.dumps({**times, "rows": rows}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
