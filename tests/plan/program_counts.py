"""What a compiled step multiplies and sends, loops counted as often as they turn: the source of `compiled_counts.json`.

    PYTHONPATH=tests JAX_PLATFORMS=cpu python tests/plan/program_counts.py "2 parallel.data=1 parallel.context=2"

prints the row of each argument: a number of CPU devices and overrides of a tiny transformer. `cost_analysis` counts
the body of a loop once, so that neither layers nor the turns of a ring would be in it. Loops over the blocks of
experts turn as often as the routing says: their rows of the file were made by hand.
"""

import json
import math
import re
import sys
from typing import Any

from program_text import array_bytes, arrays, read_program

from jaxtrain.config import load_config
from jaxtrain.config.schema import Config
from jaxtrain.plan.compile import batch_shapes
from jaxtrain.plan.workload import describe_workload
from jaxtrain.runtime import distributed

# Plain attention and whole logits: each product is one matmul of the program.
TINY = """
    model.num_layers=2 model.embed_dim=32 model.num_heads=2 model.mlp_dim=64 model.max_sequence_length=64
    model.vocab_size=64 data.kind=synthetic data.vocab_size=64 train.global_batch_size=16 train.accumulation_steps=1
    remat.policy=none precision.policy=fp32 loss.logits=whole parallel.data=1
"""

_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def program_counts(text: str, kinds: tuple[str, ...] = ("all-to-all", "collective-permute")) -> dict[str, float]:
    """FLOPs of the matmuls of a program on one device, and bytes of the results of its collectives by kind.

    Args:
        text: optimized HLO, as `compiled.as_text()` gives it.
        kinds: of collectives.
    """
    program = read_program(text)

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
            turns = _TURNS.search(one.rest)
            assert turns or one.kind != "while", f"a loop of unknown turns: {one.rest[:200]}"
            number_of_turns = int(turns.group(1)) if turns else 1
            for called in one.called:
                for what, number in count(called).items():
                    total[what] += number * number_of_turns
        return total

    return count(program.entry)


def tiny_config(words: str) -> tuple[int, Config]:
    """The devices and the config of a row."""
    devices, *overrides = words.split()
    attention = [] if "parallel.context" in words else ["model.attention=reference"]
    return int(devices), load_config(None, overrides=[*TINY.split(), *attention, *overrides]).config


def compile_counts(words: str) -> dict[str, Any]:
    """What the compiled step of a row multiplies, sends and holds on one device."""
    import jax

    from jaxtrain.train.assemble import build_step

    count, config = tiny_config(words)
    workload = describe_workload(config)
    sizes = {name: getattr(workload, name) for name in ("input_shape", "vocab_size", "num_outputs")}
    step = build_step(config, **sizes, devices=jax.devices()[:count])
    compiled = step.compile(batch_shapes(workload))
    found = program_counts(compiled.as_text(), ("all-to-all", "all-reduce"))
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
