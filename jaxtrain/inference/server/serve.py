"""From an opened model to a server that answers: its address, its programs, and the signals that end it."""

import ipaddress
import os
import signal
import socket
import sys
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from jaxtrain.errors import ConfigError
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.opened import OpenedModel
from jaxtrain.inference.prompts import PromptReader, decoder_of
from jaxtrain.inference.server.app import Service

_KEY_VARIABLE = "JAXTRAIN_API_KEY"
# Seconds that an idle connection is kept for the next request.
_KEEP_ALIVE = 30
# Of a model that takes longer texts, unless more is asked for: the cache of every slot is of this length.
_LONGEST = 4096
_CLIENT_MILLISECONDS = 20_000


def read_api_key(file: str | None) -> str | None:
    """Read the key that clients must give: from a file that holds it alone, else from the environment.

    Returns:
        The key; None: there is none.

    Raises:
        ConfigError: the file cannot be read, or the key is empty.
    """
    if file is None:
        key = os.environ.get(_KEY_VARIABLE)
    else:
        try:
            key = Path(file).expanduser().read_text().strip()
        except OSError as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error.strerror}") from None
    if key == "":
        raise ConfigError(f"--api-key-file or {_KEY_VARIABLE} holds no valid key; 'openssl rand -hex 32' writes one")
    return key


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Bind a socket to an address; nobody can connect to it yet.

    The system drops a connection whose client takes nothing for 20 seconds, or the server could not end.

    Args:
        host: name or address.
        port: 0: one that is free.
        has_key: whether clients must give a key.

    Raises:
        ConfigError: the address is not of this machine, is taken, or is open to others without a key.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not has_key and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"--host {host} can be reached from other machines; give --api-key-file FILE or {_KEY_VARIABLE}, or "
                "leave --host out"
            )
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # what connects has the options of this socket
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CLIENT_MILLISECONDS)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at --host {host} --port {port}: {error}; use an address of this machine, and a "
            "free port above 1023, or 0"
        ) from None
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the address of a socket as people write it in a browser."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_app(app: Starlette, bound: socket.socket) -> None:
    """Serve an application until SIGTERM or Ctrl-C; what runs then is finished, and a second Ctrl-C ends at once.

    To be called in the main thread, where signals arrive.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles them while it serves, and raises them again at its end.
        signal.signal(number, signal.SIG_IGN)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE,
    )
    uvicorn.Server(config).run(sockets=[bound])


def start_service(
    opened: OpenedModel, name: str, *, slots: int, length: int | None, queue: int, api_key: str | None = None
) -> Service:
    """Compile what a model needs to be asked, before the first request.

    Args:
        opened: a model that writes texts.
        name: what clients call it.
        slots: requests that run at a time.
        length: tokens of prompt and answer together; None: all that the model takes, up to 4,096.
        queue: requests that may wait while all slots are taken.
        api_key: that clients must give; None: none.

    Raises:
        ConfigError: a number that does not fit the model.
    """
    reader = PromptReader(opened.text_tokenizer(), opened.chat, opened.special)
    decoder = decoder_of(opened.sharded_model.model, has_encoder=False)
    if length is None:
        length = min(_LONGEST, decoder.max_length, decoder.short_length or _LONGEST)
    engine = Engine(opened.sharded_model, opened.params, slots=slots, length=length, queue=queue)
    engine.start()
    return Service(name, int(time.time()), reader, engine, length, api_key)
