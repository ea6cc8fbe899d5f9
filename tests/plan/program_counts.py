"""What a compiled step multiplies and sends, loops counted as often as they turn: the source of `compiled_counts.json`.

    JAX_PLATFORMS=cpu python tests/plan/program_counts.py "2 parallel.data=1 parallel.context=2"

prints the row of each argument: a number of CPU devices and overrides of a tiny transformer. `cost_analysis` counts
the body of a loop once, so that neither layers nor the turns of a ring would be in it.
"""

import json
import math
import re
import sys
from typing import Any

from jaxtrain.config import load_config
from jaxtrain.config.models import TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.degrees import AXES
from jaxtrain.ops.experts.rows import block_rows, round_rows
from jaxtrain.parallel.division import batch_shards
from jaxtrain.plan.compilers.exact import batch_shapes
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.plan.workload.record import Workload
from jaxtrain.runtime import distributed

# Plain attention and whole logits: each product is one matmul of the program.
TINY = """
    model.num_layers=2 model.embed_dim=32 model.num_heads=2 model.mlp_dim=64 model.max_sequence_length=64
    model.vocab_size=64 data.kind=synthetic data.vocab_size=64 train.global_batch_size=16 train.accumulation_steps=1
    remat.policy=none precision.policy=fp32 loss.logits=whole parallel.data=1
"""

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_RESULT = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def _arrays(text: str) -> list[tuple[int, list[int]]]:
    """(bytes of an element, dims) of each array of a type."""
    found = []
    for name, dims in _ARRAY.findall(text):
        bits = 8 if name == "pred" else int(re.sub(r"\D", "", name))
        found.append((bits // 8, [int(n) for n in dims.split(",") if n]))
    return found


def _bytes(text: str) -> int:
    return sum(size * math.prod(dims) for size, dims in _arrays(text))


def program_counts(
    text: str, kinds: tuple[str, ...] = ("all-to-all", "collective-permute"), *, expert_blocks: int | None = None
) -> dict[str, float]:
    """FLOPs of the matmuls of a program on one device, and bytes of the results of its collectives by kind.

    Args:
        text: optimized HLO, as `compiled.as_text()` gives it.
        kinds: of collectives.
        expert_blocks: turns of the loops over the blocks of rows of an expert, which the routing gives; None: there
            are no such loops. The loop of further rounds of the exchange does not turn, as with an even routing.
    """
    lines: dict[str, list[str]] = {}
    entry = name = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header.group(2)
            lines[name] = []
            entry = name if header.group(1) else entry
        elif name is not None:
            lines[name].append(line)
    assert entry is not None

    def count(computation: str) -> dict[str, float]:
        total = {"flops": 0.0, **dict.fromkeys(kinds, 0.0)}
        shapes: dict[str, list[int]] = {}
        for line in lines[computation]:
            match = _RESULT.match(line)
            if match is None:
                continue
            result, kind, rest = match.group(2), match.group(3), match.group(4)
            arrays = _arrays(result)
            shapes[match.group(1)] = arrays[0][1] if len(arrays) == 1 else []
            if kind == "dot":
                operand = re.findall(r"%([\w.\-]+)", rest)[0]
                contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
                assert contracted is not None
                dims = [shapes[operand][int(n)] for n in contracted.group(1).split(",") if n]
                total["flops"] += 2 * math.prod(arrays[0][1]) * math.prod(dims)
            elif kind in kinds:
                total[kind] += _bytes(result)
            called = _CALLED.findall(line) + [
                one.strip().lstrip("%") for branches in _BRANCHES.findall(line) for one in branches.split(",")
            ]
            turns = _TURNS.search(line)
            number_of_turns = 1
            if kind == "while":
                known = int(turns.group(1)) if turns else 0 if "further_rounds" in line else expert_blocks
                assert known is not None, f"a loop without a known number of turns: {line[:200]}"
                number_of_turns = known
            for one in called if kind not in ("reduce", "all-reduce", "reduce-scatter", "sort", "scatter") else ():
                for what, number in count(one).items():
                    total[what] += number * number_of_turns
        return total

    return count(entry)


def tiny_config(words: str) -> tuple[int, Config]:
    """The devices and the config of a row."""
    devices, *overrides = words.split()
    attention = [] if "parallel.context" in words else ["model.attention=reference"]
    return int(devices), load_config(None, overrides=[*TINY.split(), *attention, *overrides]).config


def _expert_blocks(config: Config, workload: Workload) -> int | None:
    """Blocks of each expert of a device where the routing is even."""
    if not isinstance(config.model, TransformerConfig) or config.model.experts is None:
        return None
    degrees = {axis: int(getattr(config.parallel, axis)) for axis in AXES}
    rows = workload.rows / batch_shards(degrees) / config.train.accumulation_steps
    tokens = rows * (workload.sequence_length or 1) / degrees["context"]
    experts, shards = config.model.experts, degrees["expert"]
    here = experts.num_experts // shards
    sent = round_rows(tokens, experts.experts_per_token, experts.num_experts, shards)
    num_rows = tokens * experts.experts_per_token if shards == 1 else shards * sent
    return math.ceil(tokens * experts.experts_per_token / here / block_rows("cpu", num_rows, here))


def compile_counts(words: str) -> dict[str, Any]:
    """What the compiled step of a row multiplies, sends and holds on one device."""
    import jax

    from jaxtrain.train.assemble import build_step

    count, config = tiny_config(words)
    workload = describe_workload(config)
    sizes = {name: getattr(workload, name) for name in ("input_shape", "vocab_size", "num_outputs")}
    step = build_step(config, **sizes, devices=jax.devices()[:count])
    compiled = step.compile(batch_shapes(workload))
    found = program_counts(
        compiled.as_text(), ("all-to-all", "all-reduce"), expert_blocks=_expert_blocks(config, workload)
    )
    return {
        "config": words,
        "flops": round(found["flops"]),
        "all_to_all_bytes": round(found["all-to-all"]),
        "all_reduce_bytes": round(found["all-reduce"]),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    distributed.start(emulate=8)
    for words in sys.argv[1:]:
        print(json.dumps(compile_counts(words)), flush=True)
