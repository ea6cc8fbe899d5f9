"""The one file that makes Orbax write to s3://: it replaces four of its private names.

Why: Orbax 0.12 sends everything but gs:// to the driver for files ("Checkpoint path should be absolute"), although
tensorstore, which writes the arrays, speaks S3 itself. Upstream: orbax issue 359 and pull request 2739, both open. What
is replaced decides only three things: which addresses are those of a store (where a step is complete once its
`commit_success.txt` is written, since a store cannot rename), which driver of tensorstore an address gets, and that
the two slashes of an address are kept. gs:// and local paths get what they got before.
"""

import functools
import importlib
import os
from typing import Any

_PREFIX = "s3://"


@functools.cache
def enable() -> None:
    """Make Orbax write to s3:// in this process; further calls do nothing."""
    stores: Any = importlib.import_module("orbax.checkpoint._src.path.gcs_utils")
    tensorstore: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    plain_spec, plain_driver = stores.get_kvstore_for_gcs, tensorstore._use_gcs_driver
    plain_path = tensorstore._normalize_path

    def spec(path: Any) -> dict[str, Any]:
        return s3_spec(str(path)) if str(path).startswith(_PREFIX) else plain_spec(path)

    def normal(path: str) -> str:
        found = plain_path(path)
        return found.replace("s3:/", _PREFIX, 1) if path.startswith(_PREFIX) else found

    stores._GCS_PATH_PREFIX = (*stores._GCS_PATH_PREFIX, _PREFIX)
    stores.get_kvstore_for_gcs = spec
    tensorstore._use_gcs_driver = lambda directory: directory.startswith(_PREFIX) or plain_driver(directory)
    tensorstore._normalize_path = normal


def s3_spec(address: str) -> dict[str, Any]:
    """Return what tensorstore takes for an address, whose driver does not read the variables of another endpoint."""
    bucket, _, key = address.removeprefix(_PREFIX).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key.rstrip("/")}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint
    if region:
        spec["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        # Where the usual search would begin too; but that one opens all files first, and logs those that are not there.
        spec["aws_credentials"] = {"type": "environment"}
    return spec
