"""Several processes do a part of their start together: all go on, or all end, each with one line that says why.

What each process did is exchanged by a collective, and before it all meet at a barrier of the coordination service.
Gloo, which carries collectives between CPU processes, lets a process wait for another one for 30 s only; the barrier
has no such limit, so nobody is lost while a neighbour reads data or compiles.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxtrain.errors import CheckpointError, ConfigError, DataError, DivergedError, StorageError, UserError
from jaxtrain.runtime import distributed
from jaxtrain.runtime.cluster import detect_cluster, environment_number
from jaxtrain.runtime.remarks import print_remark

if TYPE_CHECKING:
    from jax.sharding import Mesh

Work = TypeVar("Work")
# Fact -> its value and where it was set ("" where that says nothing).
Facts = Mapping[str, tuple[str, str]]

# A process that died ends the others within the heartbeat timeout, so this limits only what all are waiting for.
_LONGEST_WAIT_MILLISECONDS = 7 * 24 * 3600 * 1000
_MOST_NAMED = 8
_JOIN_TIMEOUT = "JAXTRAIN_JOIN_TIMEOUT_SECONDS"
# How long a process with an error waits for those that it tells of it.
_TELLING_SECONDS = 60
_LONGEST_VALUE = 80
_ERRORS = {error.exit_code: error for error in (ConfigError, DataError, CheckpointError, DivergedError, StorageError)}
# Every process asks for the same barriers in the same order, and none of them twice.
_numbers = itertools.count()


def meet() -> None:
    """Wait until every process is here; nothing happens where there is only one.

    Call it before the first collective after work that takes one process longer than another, such as compiling.
    Every process calls it, in the main thread, at the same places.
    """
    import jax

    if jax.process_count() == 1:
        return
    # The public door to the coordination service: jax itself has none.
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn()
    # A process that tells of an error meets the others wherever they are, so that the place is not in the key.
    wait(key=f"jaxtrain {next(_numbers)}", timeout_ms=_LONGEST_WAIT_MILLISECONDS)


def said_by_main(verdict: bool) -> bool:
    """Give every process the verdict of process 0.

    Args:
        verdict: of this process; that of the others is dropped.
    """
    import jax

    if jax.process_count() == 1:
        return verdict
    import numpy as np
    from jax.experimental import multihost_utils

    meet()
    return bool(multihost_utils.broadcast_one_to_all(np.int32(verdict)))


def compiled_by_all(mesh: "Mesh", compile_program: Callable[[], object]) -> None:
    """Compile a program in every process before one of them runs it, and waits in its first collective for the others.

    Where not every process takes part nothing is done, since the call of the program compiles it.

    Args:
        mesh: the devices that run the program.
        compile_program: compiles; what it gives is dropped, because jax keeps it for the call.
    """
    import jax

    count = jax.process_count()
    if count > 1 and len({device.process_index for device in mesh.devices.flat}) == count:
        compile_program()
        meet()


def together(work: Callable[[], Work], *, says: Callable[[Work], Facts] | None = None) -> Work:
    """Do the same work in every process, and go on only if all did it and say the same of it.

    The work may contain no collective, since a process that fails would be missing in it.

    Args:
        work: is called.
        says: gives facts of its result that must be the same in all processes; None: there are none.

    Returns:
        What the work gave.

    Raises:
        UserError: the error of the work; where it failed in another process only, one of the same exit code that names
            that process. The processes stay in their cluster where all raise the same error, and leave it otherwise.
        ConfigError: facts differ; names each with both values.
    """
    return _by_all(work, says=says, tells=None)[0]


def told(work: Callable[[], Work], *, tells: Callable[[Work], str]) -> tuple[Work, list[str]]:
    """Do the same work in every process as `together` does, and learn what each process tells of it.

    All processes learn the same, so that what they decide by it they decide alike.

    Args:
        work: is called; it may contain no collective.
        tells: gives the text that this process tells of its result.

    Returns:
        What the work gave, and the texts of all processes in their order.

    Raises:
        UserError: as for `together`.
    """
    return _by_all(work, says=None, tells=tells)


def _by_all(
    work: Callable[[], Work], *, says: Callable[[Work], Facts] | None, tells: Callable[[Work], str] | None
) -> tuple[Work, list[str]]:
    import jax

    if jax.process_count() == 1:
        result = work()
        return result, [] if tells is None else [tells(result)]
    result, failure, said = None, None, {}
    try:
        result = work()
        facts = {} if says is None else {name: list(fact) for name, fact in says(result).items()}
        said = {"facts": facts, "tells": "" if tells is None else tells(result)}
    except Exception as error:
        failure, said = error, _described(error)
    everyone = [json.loads(text) for text in exchange(json.dumps(said, sort_keys=True))]
    verdict = verdict_of(everyone)
    if verdict is None:
        assert failure is None
        # No failure, so the result is what the work gave.
        return result, [one.get("tells", "") for one in everyone]  # pyright: ignore[reportReturnType]
    if isinstance(failure, UserError) and all(one == said for one in everyone):
        # Every process raises it here, so that a program that catches it can go on, as the only process could.
        failure.raised_by_all = True
        raise failure
    distributed.leave_together(str(verdict))
    raise failure or verdict


@contextlib.contextmanager
def announced(*, emulate: int | None = None) -> Iterator[None]:
    """Tell the other processes of the cluster, if there are any, of an error before this one joined them.

    They would otherwise wait for it until their time to join is over. The line of the error is printed before, since
    the others may start later; this process waits for them a minute.

    Args:
        emulate: number of CPU devices to emulate, as the others do.

    Raises:
        SystemExit: with the exit code of the error, where it was told to others.
    """
    try:
        yield
    except UserError as error:
        import jax

        if jax.distributed.is_initialized() or not _is_one_of_several():
            raise
        print_remark(f"jaxtrain: {' '.join(str(error).splitlines())}")
        timeout = environment_number(_JOIN_TIMEOUT) or _TELLING_SECONDS
        os.environ[_JOIN_TIMEOUT] = str(min(timeout, _TELLING_SECONDS))
        # Whatever goes wrong with telling, the error itself is what this process ends with.
        with contextlib.suppress(Exception):
            distributed.start(emulate=emulate, compilation_cache=None)
            check_devices()
            exchange(json.dumps(_described(error)))
            distributed.leave_together(str(error))
        raise SystemExit(error.exit_code) from error


def check_devices() -> None:
    """Raise where the processes do not have devices of one kind and number each.

    Raises:
        ConfigError: in every process; names both.
    """
    import jax

    counts = Counter((device.process_index, device.device_kind) for device in jax.devices())
    found: dict[int, str] = {}
    for (index, kind), count in sorted(counts.items()):
        found[index] = ", ".join(filter(None, [found.get(index, ""), f"{count} x {kind}"]))
    first = found.get(0)
    other = next((index for index, shown in found.items() if shown != first), None)
    if other is not None:
        raise ConfigError(
            f"the processes have different devices: process 0 has {first}, process {other} has {found[other]}; start "
            "every process with the same devices"
        )


def exchange(text: str) -> list[str]:
    """Give every process the texts of all, in the order of the processes; where all are alike, only digests are sent.

    Args:
        text: of this process.
    """
    import numpy as np
    from jax.experimental import multihost_utils

    content = text.encode()
    size = np.frombuffer(len(content).to_bytes(4, "big"), np.uint8)
    head = np.concatenate([size, np.frombuffer(hashlib.sha256(content).digest(), np.uint8)])
    meet()
    heads = multihost_utils.process_allgather(head)
    if (heads == head).all():
        return [text] * len(heads)
    sizes = [int.from_bytes(row[:4].tobytes(), "big") for row in heads]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    meet()  # each compiles the wider exchange
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _is_one_of_several() -> bool:
    try:
        return detect_cluster() is not None
    except UserError:
        return False


def _described(error: Exception) -> dict[str, Any]:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, UserError):
        return {"failed": " ".join(str(error).splitlines()), "code": error.exit_code}
    return {"failed": f"internal error: {type(error).__name__}: {first[:300]}", "code": 1}


def verdict_of(everyone: Sequence[Mapping[str, Any]]) -> UserError | None:
    """The error of all processes, by what each says; None where all did the work and say the same."""
    for index, said in enumerate(everyone):
        if "failed" in said:
            kind = _ERRORS.get(said["code"], UserError)
            error = kind(f"process {index} cannot go on: {said['failed']}")
            error.exit_code = said["code"]
            return error
    differing = differences([said["facts"] for said in everyone])
    if not differing:
        return None
    more = f"; and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    return ConfigError(f"the processes disagree: {'; '.join(differing[:_MOST_NAMED])}{more}")


def differences(everyone: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    """What each process says otherwise than process 0, as `seed: process 0 has 1 (command line), process 1 has 2`.

    Of parts of another kind, the kind alone is named.

    Args:
        everyone: fact -> value and where it was set, of each process.
    """
    names = sorted({name for facts in everyone for name in facts})
    first, found = everyone[0], {}
    for name in names:
        values = [_value(facts, name) for facts in everyone]
        index = next((index for index, value in enumerate(values) if value != values[0]), None)
        if index is not None:
            others = len({value for value in values if value != values[0]})
            and_others = " (others differ as well)" if others > 1 else ""
            found[name] = (
                f"{name}: process 0 has {_shown(first, name)}, process {index} has "
                f"{_shown(everyone[index], name)}{and_others}"
            )
    kinds = [name.removesuffix("kind") for name in found if name.endswith(".kind")]
    return [
        line
        for name, line in found.items()
        if not any(name.startswith(kind) and name != f"{kind}kind" for kind in kinds)
    ]


def _value(facts: Mapping[str, Sequence[str]], name: str) -> str | None:
    return facts[name][0] if name in facts else None


def _shown(facts: Mapping[str, Sequence[str]], name: str) -> str:
    if name not in facts:
        return "none"
    value, where = facts[name]
    value = value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."
    return f"{value} ({where})" if where else value
