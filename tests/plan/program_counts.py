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

from program_text import array_bytes, arrays, walk

from jaxtrain.config import load_config
from jaxtrain.config.schema import Config
from jaxtrain.parallel.programs import read_program
from jaxtrain.plan.compile import planned_step
from jaxtrain.plan.workload import describe_workload
from jaxtrain.runtime import distributed

# Plain attention and whole logits: each product is one matmul of the program.
TINY = """
    model.num_layers=2 model.embed_dim=32 model.num_heads=2 model.mlp_dim=64 model.max_sequence_length=64
    model.vocab_size=64 data.kind=synthetic data.vocab_size=64 train.global_batch_size=16 train.accumulation_steps=1
    remat.policy=none precision.policy=fp32 loss.logits=whole parallel.data=1
"""


def program_counts(text: str) -> dict[str, int]:
    """FLOPs of the matmuls of a program on one device, and bytes of the results of its collectives by kind."""
    total = {"flops": 0, "all-to-all": 0, "all-reduce": 0}
    for one, beside, turns in walk(read_program(text)):
        if one.kind == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
            assert contracted is not None
            (_, left), (_, result) = arrays(beside[one.operands[0]].result)[0], arrays(one.result)[0]
            dims = [left[int(n)] for n in contracted.group(1).split(",") if n]
            total["flops"] += turns * 2 * math.prod(result) * math.prod(dims)
        elif one.kind in total:
            total[one.kind] += turns * array_bytes(one.result)
    return total


def tiny_config(words: str) -> tuple[int, Config]:
    """The devices and the config of a row."""
    devices, *overrides = words.split()
    attention = [] if "parallel.context" in words else ["model.attention=reference"]
    return int(devices), load_config(None, overrides=[*TINY.split(), *attention, *overrides]).config


def compile_counts(words: str) -> dict[str, Any]:
    """What the compiled step of a row multiplies, sends and holds on one device."""
    import jax

    count, config = tiny_config(words)
    step, batch = planned_step(config, describe_workload(config), jax.devices()[:count])
    compiled = step.compile(batch)
    found = program_counts(compiled.as_text() or "")
    return {
        "config": words,
        "flops": found["flops"],
        "all_to_all_bytes": found["all-to-all"],
        "all_reduce_bytes": found["all-reduce"],
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    distributed.start(emulate=8)
    for words in sys.argv[1:]:
        print(json.dumps(compile_counts(words)), flush=True)
