"""`jaxtrain serve`: answers requests to a model over HTTP, as OpenAI's API does."""

import argparse
import importlib.util
from pathlib import Path

from jaxtrain.commands.shared import print_text
from jaxtrain.errors import ConfigError
from jaxtrain.inference.open import open_model
from jaxtrain.runtime import distributed
from jaxtrain.runtime.terminal import print_remark


def run(arguments: argparse.Namespace) -> int:
    """Serve a model until SIGTERM or Ctrl-C; requests that run then are finished; return 0.

    Standard output gets one line, with the address, when requests are answered; nothing is compiled after it.
    """
    missing = [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"jaxtrain serve needs {' and '.join(missing)}: pip install '.[serve]'")
    from jaxtrain.inference.server.app import build_app
    from jaxtrain.inference.server.serve import address_of, bind, read_api_key, serve_app, start_service

    key = read_api_key(arguments.api_key_file)
    with bind(arguments.host, arguments.port, has_key=key is not None) as socket:
        distributed.start(emulate=arguments.emulate)
        opened = open_model(
            arguments.path,
            adapter=arguments.adapter,
            quantize=arguments.quantize,
            step=arguments.step,
            overrides=arguments.overrides,
        )
        service = start_service(
            opened,
            arguments.name or Path(arguments.path.partition("@")[0]).resolve().name.removesuffix(".gguf"),
            slots=arguments.slots,
            length=arguments.length,
            queue=arguments.queue,
            api_key=key,
        )
        print_remark(repr(opened.sharded_model))
        print_remark(
            f"model {service.name!r}: {arguments.slots} slots of {service.length} tokens, {arguments.queue} may wait; "
            "Ctrl-C ends when running answers are done"
        )
        try:
            socket.listen()  # clients that come before the first answer wait
            print_text(f"ready: {address_of(socket)}", flush=True)
            serve_app(build_app(service, host=arguments.host), socket)
        finally:
            service.engine.close(drain=False)
    return 0
