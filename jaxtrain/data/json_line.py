"""A line of a file of JSON objects."""

import json
from typing import Any

from jaxtrain.data.skipped import BadRecordError


def json_object(line: str, *, where: str) -> dict[str, Any]:
    """Read the object of a line.

    Args:
        line: as it stands in the file.
        where: file and line, for messages.

    Raises:
        BadRecordError: it holds no JSON, or no object.
    """
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecordError(
            f"{where} is not JSON: {error.msg} at column {error.colno}; fix or remove the line"
        ) from None
    except RecursionError:
        raise BadRecordError(f"{where} is nested too deeply; fix or remove the line") from None
    except ValueError:  # Python reads no whole number of thousands of digits
        raise BadRecordError(f"{where} holds a number that is too long; fix or remove the line") from None
    if not isinstance(found, dict):
        raise BadRecordError(
            f"{where} holds a value of type {type(found).__name__}, not an object; write one object per line"
        )
    return found
