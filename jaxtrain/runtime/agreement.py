"""Several processes do a part of their start together: all go on, or all end, each with one line that says why.

`multihost_utils` broadcasts and gathers arrays; what it lacks is here. Before each of its collectives all meet at a
barrier of the coordination service: Gloo, which carries collectives between CPU processes, lets a process wait for
another one for 30 s only, and the barrier has no such limit.
"""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxtrain.errors import CheckpointError, ConfigError, DataError, DivergedError, StorageError, UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

Work = TypeVar("Work")
# Fact -> its value and where it was set ("" where that says nothing).
Facts = Mapping[str, tuple[str, str]]

# A process that died ends the others within the heartbeat timeout, so this limits only what all are waiting for.
_LONGEST_WAIT_MILLISECONDS = 7 * 24 * 3600 * 1000
_MOST_NAMED, _LONGEST_VALUE = 8, 80
_ERRORS = {error.exit_code: error for error in (ConfigError, DataError, CheckpointError, DivergedError, StorageError)}
# Every process asks for the same barriers in the same order, and none of them twice.
_numbers = itertools.count()


def meet() -> None:
    """Wait until every process is here, before the first collective after work that takes some longer than others."""
    import jax

    if jax.process_count() > 1:
        # The public door to the coordination service: jax itself has none.
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=f"jaxtrain {next(_numbers)}", timeout_ms=_LONGEST_WAIT_MILLISECONDS)


def compiled_by_all(mesh: "Mesh", compile_program: Callable[[], object]) -> None:
    """Compile a program in every process before one of them runs it, and waits in its first collective for the others.

    Where not every process has devices of the mesh nothing is done, since the call of the program compiles it; what
    `compile_program` gives is dropped, because jax keeps it for the call.
    """
    import jax

    count = jax.process_count()
    if count > 1 and len({device.process_index for device in mesh.devices.flat}) == count:
        compile_program()
        meet()


def together(work: Callable[[], Work], *, says: Callable[[Work], Facts] = lambda work: {}) -> Work:
    """Do the same work in every process, and go on only if all did it and say the same of it; returns what it gave.

    The work may contain no collective, since a process that fails would be missing in it.

    Raises:
        UserError: the error of the work; where it failed in another process only, one of the same exit code that names
            that process. They have left their cluster then, and are still in it where all raise the same error.
        ConfigError: facts differ; names each with both values.
    """
    import jax

    if jax.process_count() == 1:
        return work()
    result, failure = None, None
    try:
        result = work()
        said = {"facts": {name: list(fact) for name, fact in says(result).items()}}
    except Exception as error:
        failure, line = error, " ".join(str(error).split())
        is_line = isinstance(error, UserError)
        code = error.exit_code if isinstance(error, UserError) else 1
        said = {"failed": line if is_line else f"{type(error).__name__}: {line[:300]}", "code": code}
    everyone = [json.loads(text) for text in _exchange(json.dumps(said, sort_keys=True))]
    verdict = verdict_of(everyone)
    if verdict is None:
        return result  # pyright: ignore[reportReturnType] nobody failed, so it is what the work gave
    if isinstance(failure, UserError) and all(one == said for one in everyone):
        # A program that catches it can go on, as the only process could.
        failure.raised_by_all = True
        raise failure
    # All leave the cluster here, so that none is missed by another one, which would abort.
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
    raise failure or verdict


def check_devices() -> None:
    """Raise a ConfigError in every process where they do not have devices of one kind and number each."""
    import jax

    found: dict[int, Counter[str]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, Counter())[device.device_kind] += 1
    shown = {index: ", ".join(f"{count} x {kind}" for kind, count in each.items()) for index, each in found.items()}
    other = next((index for index, text in shown.items() if text != shown[0]), None)
    if other is not None:
        raise ConfigError(
            f"the processes have different devices: process 0 has {shown[0]}, process {other} has {shown[other]}; "
            "start every process with the same devices"
        )


def _exchange(text: str) -> list[str]:
    """Give every process the texts of all, in the order of the processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    content = np.frombuffer(text.encode(), np.uint8)
    meet()
    sizes = multihost_utils.process_allgather(np.int32(len(content)))
    meet()  # each compiles the wider exchange
    rows = multihost_utils.process_allgather(np.pad(content, (0, int(sizes.max()) - len(content))))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def verdict_of(everyone: Sequence[Mapping[str, Any]]) -> UserError | None:
    """The error of all processes, by what each says; None where all did the work and say the same."""
    for index, said in enumerate(everyone):
        if "failed" in said:
            error = _ERRORS.get(said["code"], UserError)(f"process {index} cannot go on: {said['failed']}")
            error.exit_code = said["code"]
            return error
    found = []
    for name in sorted({name for said in everyone for name in said["facts"]}):
        values = [said["facts"].get(name, ("none", "")) for said in everyone]
        index = next((index for index, (value, _) in enumerate(values) if value != values[0][0]), None)
        if index is not None:
            found.append(f"{name}: process 0 has {_shown(*values[0])}, process {index} has {_shown(*values[index])}")
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ConfigError(f"the processes disagree: {'; '.join(found[:_MOST_NAMED])}{more}") if found else None


def _shown(value: str, where: str) -> str:
    value = value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."
    return f"{value} ({where})" if where else value
