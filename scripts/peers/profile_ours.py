"""The time of a step of bench_cpu by kind of operation, from jax's profiler; prints a line of JSON.

python scripts/peers/profile_ours.py STEPS
"""

import collections
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from jaxtrain.config import load_config
from jaxtrain.runtime import distributed
from jaxtrain.runtime.host import restart

# Of an instruction in the text of a program: its name, its opcode and what follows.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\((.*)$", re.MULTILINE)
# Their time is that of the instructions inside them.
_AROUND = ("while", "call", "conditional")


def kind_of(opcode: str, path: str) -> str:
    """Return the row of the table that an instruction belongs to, by its opcode and the scopes of its `op_name`."""
    backward = "transpose(" in path
    way = "backward" if backward else "forward"
    if "blockwise_attention" in path:
        return f"attention between its projections, {way}"
    if opcode == "dot" and "/mlp/" in path:
        return f"products of the MLP, {way}"
    if opcode == "dot" and "/attention/" in path:
        return f"products of attention's projections, {way}"
    if "loss" in path or "(output" in path:
        return "output layer and loss"
    if "/optimizer" in path or "gradient_norm" in path or "clip" in path:
        return "optimizer, norm of the gradients"
    if "embed" in path:
        return "embedding"
    if "dynamic_slice" in path or "dynamic_update_slice" in path or "broadcast_in_dim" in path or opcode == "copy":
        return "slices of stacked layers, copies, zeros"
    if "while/body" in path:
        return "norms, GELU, residuals"
    return "rest"


def events(folder: Path) -> list[tuple[str, float, float]]:
    """Return name, start and end in ns of every instruction that ran, from the newest profile below a folder."""
    from jax.profiler import ProfileData

    starts: dict[object, tuple[str, float, float]] = {}
    ends: dict[object, float] = {}
    for plane in ProfileData.from_file(str(max(folder.rglob("*.xplane.pb")))).planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            if "hlo_op" in stats:
                starts[stats.get("_p", len(starts))] = event.name, event.start_ns, event.start_ns + event.duration_ns
            elif event.name.startswith("end: "):
                ends[stats.get("_c")] = event.start_ns
    # An instruction whose work goes on in other threads returns before its end is reported.
    return [(name, start, max(end, ends.get(key, end))) for key, (name, start, end) in starts.items()]


def wall_shares(found: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return the wall time in ns of each name; where several run at once, each gets its part."""
    points = sorted(
        (moment, starts, number)
        for number, (_, start, end) in enumerate(found)
        for moment, starts in ((start, True), (end, False))
    )
    shares: dict[str, float] = collections.defaultdict(float)
    running: set[int] = set()
    last = 0.0
    for moment, starts, number in points:
        for one in running:
            shares[found[one][0]] += (moment - last) / len(running)
        (running.add if starts else running.discard)(number)
        last = moment
    return shares


def main(steps: int) -> None:
    """Profile some steps after two others."""
    config = load_config("bench_cpu").config
    distributed.start(compilation_cache=None)
    import jax

    from jaxtrain.train.assemble import assemble, open_run_data

    parts = assemble(config, open_run_data(config))
    step = parts.step
    text = step.compile(parts.batches.spec()).as_text() or ""
    opcodes, paths = {}, {}
    for name, opcode, after in _INSTRUCTION.findall(text):
        found = re.search(r'op_name="([^"]*)"', after)
        opcodes[name], paths[name] = opcode, found[1] if found else ""
    state = step.init(config.seed)
    load = step.loader(parts.batches)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0

    def run(first: int, last: int) -> float:
        nonlocal state
        batches = [load(number) for number in range(first, last)]
        began = time.perf_counter()
        for batch in batches:
            state, _ = step(state, batch)
            jax.block_until_ready(state)
        return time.perf_counter() - began

    run(0, 2)
    without = run(2, 2 + steps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            seconds = run(2 + steps, 2 + 2 * steps)
        shares = wall_shares([one for one in events(Path(folder)) if not one[0].startswith(_AROUND)])
    rows: dict[str, float] = collections.defaultdict(float)
    for name, nanoseconds in shares.items():
        rows[kind_of(opcodes.get(name, ""), paths.get(name, ""))] += nanoseconds / 1e6 / steps
    rows["between the operations"] = seconds * 1e3 / steps - sum(rows.values())
    print(json.dumps({"profiled_ms": seconds * 1e3 / steps, "plain_ms": without * 1e3 / steps, "rows": rows}))


if __name__ == "__main__":
    restart(accelerator=False)  # as `jaxtrain train` does
    main(int(sys.argv[1]))
