"""Maintenance notices of Google Cloud: the metadata server of a VM says that the VM is about to end. No jax here.

The two values that are watched, and the request that returns once a value changes, are described at
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and
https://cloud.google.com/compute/docs/instances/create-use-preemptible: `maintenance-event` changes a minute before a
host is maintained (an hour where a GPU is attached), and only for a VM that asks for it; `preempted` changes 30 seconds
before a spot VM ends. TPU VMs are VMs of Compute Engine (https://cloud.google.com/tpu/docs/maintenance-events).
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from jaxtrain.runtime.remarks import print_remark

_DEFAULT_HOST = "metadata.google.internal"
_PRODUCT = Path("/sys/class/dmi/id/product_name")
# What ends a VM. A VM that migrates while it runs (MIGRATE_ON_HOST_MAINTENANCE) loses nothing and goes on.
_ENDS = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "its host is about to be maintained"),
    "preempted": ("TRUE", "it is taken back"),
}
_FIRST_ANSWER_SECONDS = 2.0
_WAIT_SECONDS = 60
_RETRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.5


def watch_metadata(wanted: Literal["auto"] | bool, announce: Callable[[str], None]) -> Callable[[], None]:
    """Watches the metadata server in the background, and announces the end of this VM once.

    A notice that stands when the watching begins is not announced, but shown: a process that was started again on the
    same VM within the hour of a notice would otherwise never get to work. The VM still sends SIGTERM at its end.

    Args:
        wanted: True; False; or auto, which asks only where GCE_METADATA_HOST is set or the hardware says Google.
        announce: Called on a background thread with the text of the notice.

    Returns:
        A function that ends the watching; it does not wait.
    """
    stopped = threading.Event()
    if wanted is False or (wanted == "auto" and not _may_have_server()):
        return stopped.set
    once = threading.Lock()

    def announce_once(text: str) -> None:
        if not stopped.is_set() and once.acquire(blocking=False):
            announce(text)

    for name in _ENDS:
        # Daemons: a request that waits for a change must not keep the process alive.
        arguments = (name, announce_once, stopped, wanted is True)
        threading.Thread(target=_follow, args=arguments, name=f"jaxtrain-notice-{name}", daemon=True).start()
    return stopped.set


def _may_have_server() -> bool:
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    with contextlib.suppress(OSError):
        return "Google" in _PRODUCT.read_text(encoding="utf-8", errors="replace")
    return False


def _follow(name: str, announce: Callable[[str], None], stopped: threading.Event, reports: bool) -> None:
    """Follows one value until it says that the VM ends."""
    fatal, why = _ENDS[name]
    host = os.environ.get("GCE_METADATA_HOST") or _DEFAULT_HOST
    text = f"metadata server: {name} is {fatal}, {why}"
    found = _ask(host, name, None)
    if found is None:
        if reports and name == "preempted":
            print_remark(
                f"notices.metadata=true, but no metadata server answers at {host}; maintenance notices are not heard"
            )
        return
    value, etag = found
    if value == fatal:
        print_remark(f"{text}: this was so when the run began, which goes on until SIGTERM")
    is_known = value == fatal
    while not stopped.is_set():
        found = _ask(host, name, etag)
        if found is None:
            stopped.wait(_RETRY_SECONDS)
            continue
        value, etag = found
        if value == fatal and not is_known:
            announce(text)
            return
        is_known = is_known and value == fatal
        stopped.wait(_PAUSE_SECONDS)  # a server that does not wait for a change must not be asked without pause


def _ask(host: str, name: str, etag: str | None) -> tuple[str, str] | None:
    """The value and its tag; None: no answer.

    Args:
        host: The server, with its port where it is not 80.
        name: Of the value.
        etag: Of the last answer, after which the request waits for a change; None: the value at once.
    """
    # Here, because it imports ssl and email, which a run elsewhere has no use for.
    import http.client
    import urllib.request

    wait = "" if etag is None else f"?wait_for_change=true&timeout_sec={_WAIT_SECONDS}&last_etag={etag}"
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{name}{wait}", headers={"Metadata-Flavor": "Google"}
    )
    # The server is on the link of this machine: a proxy of the environment does not know it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limit = _FIRST_ANSWER_SECONDS if etag is None else _WAIT_SECONDS + _RETRY_SECONDS
    try:
        with opener.open(request, timeout=limit) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":
                return None
            return answer.read(1024).decode("utf-8", errors="replace").strip(), answer.headers.get("ETag") or "0"
    # urllib's own errors are OSErrors; the others are answers of something else, and a host that is no address.
    except (OSError, ValueError, http.client.HTTPException):
        return None
