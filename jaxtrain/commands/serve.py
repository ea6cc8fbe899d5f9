"""`jaxtrain serve`: a model behind OpenAI's interface, until a signal comes."""

import importlib.util
import sys
import time
from collections.abc import Sequence

from jaxtrain.commands.output import print_text
from jaxtrain.errors import ConfigError
from jaxtrain.inference.server.address import address_of, bind, listen, read_api_key
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark

_PACKAGES = ("starlette", "uvicorn")


def run_serve(
    path: str,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    api_key_file: str | None,
    slots: int,
    length: int | None,
    queue: int,
    speculate: int,
    adapter: str | None,
    quantize: str | None,
    step: int | None,
    name: str | None,
    emulate: int | None,
) -> int:
    """Serve a model until SIGTERM or Ctrl-C; what runs then is finished.

    Standard output gets one line, with the address, when requests are answered; nothing is compiled after it.

    Args:
        path: directory of a run, published folder, GGUF file, or folder of an adapter.
        overrides: settings on top of the run's or the model's.
        host: address to listen at.
        port: of the address; 0: one that is free.
        api_key_file: file with the key that clients must give; None: that of the environment, or none.
        slots: requests that run at a time.
        length: tokens of prompt and answer together; None: all that the model takes, up to 4,096.
        queue: requests that may wait while all slots are taken.
        speculate: longest draft by prompt lookup for greedy requests; 0: none.
        adapter: folder of an adapter over a published folder.
        quantize: number format of the linear layers; None: as they are.
        step: step of the checkpoint of a run; None: the newest intact one.
        name: what clients call the model; None: the last part of the path.
        emulate: number of CPU devices to emulate; None: the devices of the machine.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: the extra is not installed, the address cannot be used, or there is nothing to serve.
    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"jaxtrain serve needs {' and '.join(missing)}: pip install 'jaxtrain[serve]'")
    # What is quick to find out is found out before the model is read.
    key = read_api_key(api_key_file)
    taken = bind(host, port, has_key=key is not None)
    with taken:
        began = time.monotonic()
        from jaxtrain.run.served import open_served

        distributed.start(emulate=emulate)
        served = open_served(path, adapter=adapter, quantize=quantize, step=step, overrides=overrides, name=name)
        from jaxtrain.inference.server.app import build_app
        from jaxtrain.inference.server.listening import serve_app
        from jaxtrain.inference.server.service import start_service

        started = start_service(served, slots=slots, length=length, queue=queue, speculate=speculate, api_key=key)
        listen(taken)
        address = address_of(taken)
        print_remark(f"{served.sharded_model!r}")
        print_remark(f"model {served.name!r}: {started.summary}; compiled in {time.monotonic() - began:.1f} s")
        print_remark(f"clients: base_url {address}/v1; in a browser: {address}")
        try:
            serve_app(build_app(started.service, host=host), taken, when_ready=lambda: _say_ready(address))
        finally:
            started.close()
    return 0


def _say_ready(address: str) -> None:
    print_text(f"ready: {address}")
    sys.stdout.flush()
