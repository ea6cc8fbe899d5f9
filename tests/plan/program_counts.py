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
from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.rules import AXES
from jaxtrain.ops.experts.blocks import PARTS, REST
from jaxtrain.ops.experts.rows import block_rows, round_rows
from jaxtrain.parallel.division import batch_shards
from jaxtrain.plan.compilers.exact import batch_shapes
from jaxtrain.plan.compilers.program_text import array_bytes, arrays, read_program
from jaxtrain.plan.workload.describe import describe_workload
from jaxtrain.plan.workload.record import Workload
from jaxtrain.runtime import distributed

# Plain attention and whole logits: each product is one matmul of the program.
TINY = """
    model.num_layers=2 model.embed_dim=32 model.num_heads=2 model.mlp_dim=64 model.max_sequence_length=64
    model.vocab_size=64 data.kind=synthetic data.vocab_size=64 train.global_batch_size=16 train.accumulation_steps=1
    remat.policy=none precision.policy=fp32 loss.logits=whole parallel.data=1
"""

_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def program_counts(
    text: str, kinds: tuple[str, ...] = ("all-to-all", "collective-permute"), *, expert_blocks: int | None = None
) -> dict[str, float]:
    """FLOPs of the matmuls of a program on one device, and bytes of the results of its collectives by kind.

    Args:
        text: optimized HLO, as `compiled.as_text()` gives it.
        kinds: of collectives.
        expert_blocks: blocks of the rows of an expert, which the routing gives; None: there are no experts. Most are
            multiplied in whole parts, each in a turn of a loop; the rest at once, in the one turn of the loop for their
            number. The loop of further rounds of the exchange does not turn, as with an even routing.
    """
    program = read_program(text)
    # A part has as many blocks as the largest number that has a loop.
    part = max(map(int, re.findall(rf"/{REST}(\d+)/", text)), default=1)

    def count(computation: str) -> dict[str, float]:
        total = {"flops": 0.0, **dict.fromkeys(kinds, 0.0)}
        beside = program.named[computation]
        for one in beside.values():
            if one.kind == "dot":
                contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
                assert contracted is not None
                (_, left), (_, result) = arrays(beside[one.operands[0]].result)[0], arrays(one.result)[0]
                dims = [left[int(n)] for n in contracted.group(1).split(",") if n]
                total["flops"] += 2 * math.prod(result) * math.prod(dims)
            elif one.kind in kinds:
                total[one.kind] += array_bytes(one.result)
            number_of_turns = 1
            if one.kind == "while":
                turns = _TURNS.search(one.rest)
                number_of_turns = int(turns.group(1)) if turns else _turns_of_routing(one.rest, expert_blocks, part)
            for called in one.called:
                for what, number in count(called).items():
                    total[what] += number * number_of_turns
        return total

    return count(program.entry)


def _turns_of_routing(loop: str, blocks: int | None, part: int) -> int:
    """How often a loop of the experts turns: over whole parts of an expert's blocks, or over what is left of them."""
    assert blocks is not None, f"a loop of unknown turns: {loop[:200]}"
    # Of blocks at least one is left.
    parts = max(blocks - 1, 0) // part
    left = re.search(rf"/{REST}(\d+)/", loop)
    if "further_rounds" in loop:
        return 0
    if left is not None:
        return int(int(left.group(1)) == blocks - parts * part)
    assert f"/{PARTS}/" in loop, f"a loop of unknown turns: {loop[:200]}"
    return parts


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
