"""Which products of the 8-bit linear layers a compiled program multiplies in 8 bits, read off its text. No jax here."""

import re
from dataclasses import dataclass

# The scopes of `ops/fp8.py`.
PRODUCTS = ("fp8_forward", "fp8_input_gradient", "fp8_kernel_gradient")

_DEFINED = re.compile(r"(?:ROOT )?%?([\w.-]+) = (\w+)\[")
_DOT = re.compile(r"= .*? (?:dot|convolution)\(%?([\w.-]+), %?([\w.-]+)")
_CUBLAS = re.compile(r'custom_call_target="(__cublas[^"]*)"')


@dataclass(frozen=True)
class Products:
    """Instructions of one kind of product in the program of a GPU; each runs once a layer where layers are scanned.

    Attributes:
        native: that multiply 8-bit numbers: cuBLAS calls (`__cublas$lt$matmul$f8`), or products inside a kernel that
            XLA writes through Triton.
        emulated: that multiply wider numbers.
    """

    native: int
    emulated: int


def fp8_products(program: str) -> dict[str, Products]:
    """Count them, by scope.

    Args:
        program: `as_text()` of a compiled step.
    """
    counts = {name: [0, 0] for name in PRODUCTS}
    types: dict[str, str] = {}
    for line in program.splitlines():
        line = line.strip()
        if line.endswith("{"):  # a computation begins, and names of another one mean nothing in it
            types = {}
        defined = _DEFINED.match(line)
        if defined:
            types[defined[1]] = defined[2]
        dot, call = _DOT.search(line), _CUBLAS.search(line)
        scope = next((name for name in PRODUCTS if f"/{name}/" in line), None)
        if scope is None or (dot is None and call is None):
            continue
        if call is not None:
            native = call[1].endswith("$f8")
        else:
            assert dot is not None
            native = all(types.get(operand, "").startswith("f8") for operand in dot.groups())
        counts[scope][0 if native else 1] += 1
    return {name: Products(*pair) for name, pair in counts.items()}
