"""The files of the functions that a config names: recorded with a run, and compared when it goes on."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.config.kinds import called_parts
from jaxtrain.config.schema import Config
from jaxtrain.run.own_parts import OwnParts
from jaxtrain.runtime.call import source_digest

PARTS = ("model", "task", "data", "optimizer")


def called_sources(
    config: Config, own: OwnParts | None = None, *, among: tuple[str, ...] = PARTS
) -> dict[str, dict[str, str | None]]:
    """The record for `run.json` and checkpoints: group -> `call`, `file` and `sha256` of the file.

    Args:
        config: of the run; its functions were called before, so that their modules are imported.
        own: the parts that came from Python in place of the config's, whose functions were not called.
        among: groups to record.
    """
    given = own or {}
    called = {name: group.call for name, group in called_parts(config).items() if name in among}
    return {name: source_digest(name, call) for name, call in called.items() if given.get(name) is None}


def source_changes(record: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A line for each function whose file changed since a record was written.

    Only the file of the function itself is compared, not what it imports. A change is no error: most do not change
    what is trained.

    Args:
        record: content of `run.json`, or the metadata of a checkpoint.
        current: what `called_sources` gives for the run that goes on.
    """
    saved = record.get("called")
    if not isinstance(saved, Mapping):
        return []
    lines = []
    for name, found in current.items():
        before = saved.get(name)
        if not isinstance(before, Mapping) or before.get("call") != found["call"]:
            continue
        if before.get("sha256") != found["sha256"]:
            lines.append(
                f"the file of {name}.call={found['call']} ({found['file']}) has changed since the run trained with it"
            )
    return lines
