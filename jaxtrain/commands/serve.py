"""`jaxtrain serve`: a model behind OpenAI's interface, until a signal comes."""

import argparse
import importlib.util
import time

from jaxtrain.commands.shared import print_text
from jaxtrain.errors import ConfigError
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark

_PACKAGES = ("starlette", "uvicorn")


def run(arguments: argparse.Namespace) -> int:
    """Serve a model until SIGTERM or Ctrl-C; what runs then is finished.

    Standard output gets one line, with the address, when requests are answered; nothing is compiled after it.
    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"jaxtrain serve needs {' and '.join(missing)}: pip install 'jaxtrain[serve]'")
    from jaxtrain.inference.server.app import build_app
    from jaxtrain.inference.server.serve import address_of, bind, listen, read_api_key, serve_app, start_service

    key = read_api_key(arguments.api_key_file)
    with bind(arguments.host, arguments.port, has_key=key is not None) as taken:
        began = time.monotonic()
        from jaxtrain.run.open_run import open_served

        distributed.start(emulate=arguments.emulate)
        served = open_served(
            arguments.path,
            adapter=arguments.adapter,
            quantize=arguments.quantize,
            step=arguments.step,
            overrides=arguments.overrides,
            name=arguments.name,
        )
        started = start_service(
            served, slots=arguments.slots, length=arguments.length, queue=arguments.queue, api_key=key
        )
        listen(taken)
        address = address_of(taken)
        print_remark(f"{served.sharded_model!r}")
        print_remark(f"model {served.name!r}: {started.summary}; compiled in {time.monotonic() - began:.1f} s")
        print_remark(f"clients: base_url {address}/v1; in a browser: {address}")

        def say_ready() -> None:
            print_text(f"ready: {address}", flush=True)

        try:
            serve_app(build_app(started.service, host=arguments.host), taken, when_ready=say_ready)
        finally:
            started.close()
    return 0
