"""Counting the matmuls of a compiled program, loops as often as they turn. No jax here."""

import math
import re
from dataclasses import dataclass, field

from jaxtrain.plan.compilers.program_text import Instruction, Program, arrays

# Attention kernels: matmuls whose sizes are not written in the program in one form.
_KERNELS = ("__cudnn$fmha", "tpu_custom_call")
_LIBRARY = ("__cublas$", "__onednn$matmul")


@dataclass(frozen=True)
class Matmuls:
    """What was counted.

    Attributes:
        number: Matmuls, and kernels (of attention, for example) that hold some.
        flops: FLOPs of the matmuls; those of kernels are not counted.
        kernels: Of the number, the kernels.
    """

    number: int = 0
    flops: float = 0.0
    kernels: int = 0

    def __add__(self, other: "Matmuls") -> "Matmuls":
        return Matmuls(self.number + other.number, self.flops + other.flops, self.kernels + other.kernels)

    def times(self, turns: int) -> "Matmuls":
        """As many turns of it."""
        return Matmuls(self.number * turns, self.flops * turns, self.kernels * turns)


@dataclass(frozen=True)
class MatmulCounter:
    """Counts the matmuls of instructions of a program with all that they call; of branches the one with most."""

    program: Program
    _known: dict[str, Matmuls] = field(default_factory=dict)

    def computation(self, name: str) -> Matmuls:
        """Count those of one run of a computation."""
        if name not in self._known:
            body = self.program.computations.get(name, [])
            self._known[name] = self.count(body, body)
        return self._known[name]

    def count(self, instructions: list[Instruction], body: list[Instruction]) -> Matmuls:
        """Count those of some instructions.

        Args:
            instructions: Instructions of a computation.
            body: The whole computation.
        """
        results = {one.name: one.result for one in body}
        total = Matmuls()
        for one in instructions:
            total = total + self._own(one, results)
            inner = [self.computation(called) for called in one.called]
            if one.kind == "conditional" and inner:
                inner = [max(inner, key=lambda branch: (branch.flops, branch.number))]
            for each in inner:
                total = total + each.times(self.program.turns(one, body))
        return total

    def _own(self, one: Instruction, results: dict[str, str]) -> Matmuls:
        if one.kind == "dot":
            return Matmuls(1, _dot_flops(one, results, r"lhs_contracting_dims=\{([\d,]*)\}"))
        if one.kind == "convolution":
            return Matmuls(1, _convolution_flops(one, results))
        if one.kind == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', one.rest)
            if target and target.group(1).startswith(_LIBRARY):
                return Matmuls(1, _dot_flops(one, results, r'"lhs_contracting_dimensions":\[([\d",]*)\]'))
            if target and target.group(1).startswith(_KERNELS):
                return Matmuls(number=1, kernels=1)
        return Matmuls()


def _dot_flops(one: Instruction, results: dict[str, str], contracting: str) -> float:
    found = re.search(contracting, one.rest)
    operands = arrays(results.get(one.operands[0], ""))
    if found is None or not operands:
        return 0.0
    summed = [operands[0][1][int(n)] for n in re.findall(r"\d+", found.group(1))]
    return 2.0 * math.prod(arrays(one.result)[0][1]) * math.prod(summed)


def _convolution_flops(one: Instruction, results: dict[str, str]) -> float:
    """Multiply-adds of a convolution, windows that stand on padding left out: TPUs write batched matmuls with such."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    given, kernel = (arrays(results.get(operand, "")) for operand in one.operands[:2])
    if labels is None or not given or not kernel:
        return 0.0
    of_input, of_kernel, of_output = (dict(zip(names, range(len(names)), strict=True)) for names in labels.groups())
    output = arrays(one.result)[0][1]
    window = dict(re.findall(r"(\w+)=([\w\-]+)", (re.search(r"window=\{([^}]*)\}", one.rest) or ["", ""])[1]))
    spatial = sorted(name for name in of_output if name.isdigit())

    def of_window(name: str, default: int) -> list[int]:
        return [int(n) for n in window[name].split("x")] if name in window else [default] * len(spatial)

    before = [int(pad.split("_")[0]) for pad in window["pad"].split("x")] if "pad" in window else [0] * len(spatial)
    strides, input_gaps, kernel_gaps = (of_window(name, 1) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    pairs = 1
    for number, name in enumerate(spatial):
        size, length = kernel[0][1][of_kernel[name]], given[0][1][of_input[name]]
        pairs *= sum(
            0 <= place <= (length - 1) * input_gaps[number] and place % input_gaps[number] == 0
            for position in range(output[of_output[name]])
            for tap in range(size)
            for place in (position * strides[number] + tap * kernel_gaps[number] - before[number],)
        )
    return 2.0 * output[of_output["b"]] * output[of_output["f"]] * kernel[0][1][of_kernel["i"]] * pairs
