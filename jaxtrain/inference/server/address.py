"""Where a server listens and who may ask it: the socket is taken before the model is read. No jax here."""

import errno
import ipaddress
import os
import resource
import socket
import sys
from pathlib import Path

from jaxtrain.errors import ConfigError
from jaxtrain.inference.server.incoming import SEND_SECONDS

KEY_VARIABLE = "JAXTRAIN_API_KEY"
_BACKLOG = 2048
_LAST_PORT = 65_535
# Files and sockets of a process; shells often allow 1,024, and every connection takes one.
_WANTED_FILES = 65_536


def read_api_key(file: str | None) -> str | None:
    """The key that clients must give: from a file, else from the environment.

    Args:
        file: that holds it alone; None: none was named.

    Returns:
        The key; None: there is none.

    Raises:
        ConfigError: the file cannot be read, or what it holds is no key.
    """
    if file is not None:
        try:
            found, where = Path(file).expanduser().read_text(encoding="utf-8").strip(), file
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(
                f"--api-key-file {file} cannot be read ({said}); name a file with the key alone"
            ) from None
    else:
        found, where = os.environ.get(KEY_VARIABLE), f"{KEY_VARIABLE} (environment)"
        if found is None:
            return None
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise ConfigError(
            f"{where} holds no key; write letters, digits and signs without spaces, as 'openssl rand -hex 32' does"
        )
    return found


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket at an address, which nobody can connect to yet.

    Args:
        host: name or address.
        port: 0: one that is free.
        has_key: whether clients must give a key.

    Raises:
        ConfigError: the address is not of this machine, is taken, or is open to others without a key.
    """
    if port > _LAST_PORT:
        raise ConfigError(f"--port {port} is beyond the last one; use 1024 to {_LAST_PORT}, or 0 for one that is free")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host}: {said}; use 127.0.0.1, or an address of this machine") from None
    family, kind, protocol, _, address = found[0]
    if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--host {host} can be reached from other machines; give --api-key-file FILE or {KEY_VARIABLE}, or leave "
            "--host out"
        )
    taken = socket.socket(family, kind, protocol)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise _unusable(error, host, port) from None
    return taken


def listen(taken: socket.socket) -> None:
    """Let clients connect to a socket from `bind`, as many as there may come.

    The system drops a connection whose client takes nothing for `SEND_SECONDS`: what was written for it would be kept,
    and the server could not end.

    Raises:
        ConfigError: another process listens there since.
    """
    host, port = taken.getsockname()[:2]
    if sys.platform == "linux":  # what connects has the options of this socket
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_SECONDS))
    try:
        taken.listen(_BACKLOG)
    except OSError as error:
        raise _unusable(error, host, port) from None
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if most == resource.RLIM_INFINITY else min(_WANTED_FILES, most)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def address_of(taken: socket.socket) -> str:
    """The address of a socket as people write it in a browser."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _unusable(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port {port} of {host} is in use; use another, or 0 for one that is free")
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port} needs the rights of an administrator; use one of 1024 or more")
    return ConfigError(f"cannot listen at {host} port {port}: {error.strerror}; use 127.0.0.1 and another --port")
