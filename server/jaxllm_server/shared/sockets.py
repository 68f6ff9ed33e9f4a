"""The listening sockets of both front ends."""

from __future__ import annotations

import socket
from pathlib import Path

from jaxllm.errors import UserError

BACKLOG = 2048  # connections that may wait to be taken


def check_uds(path: str, flag: str) -> None:
    """Make sure that no process listens on a path, and remove the socket that a killed process has left there.

    What else is wrong with it (a file of another kind, no folder, no right) is left to the caller.

    Raises:
        UserError: naming `flag`, where a server answers: to bind would mean to take its place.
    """
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a server whose backlog is full is one, too: that is a BlockingIOError
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
        except OSError:
            return
    raise UserError(f"{path} is in use: another server listens on it. Choose another path.", flag)


def listen(host: str, port: int | None, uds: str | None, names: tuple[str, str, str]) -> socket.socket:
    """Open a socket of TCP, or a Unix socket; `names` are those of the front end and of the flags of both.

    Raises:
        UserError: why it cannot be opened.
    """
    name, port_flag, uds_flag = names
    if uds is not None:
        check_uds(uds, uds_flag)
    family = socket.AF_UNIX if uds is not None else _family_of(host)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if uds is None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
        else:
            listening.bind(uds)
            Path(uds).chmod(0o700)  # before a client can connect
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        where, flag = (f"{host}:{port}", port_flag) if uds is None else (uds, uds_flag)
        reason = "its folder is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        message = f"{name} cannot listen on {where}: {reason}. Choose another --{flag.replace('_', '-')}."
        raise UserError(message, flag) from error
    return listening


def _family_of(host: str) -> socket.AddressFamily:
    """Return IPv4 if a host has such an address, else IPv6."""
    try:
        found = {each[0] for each in socket.getaddrinfo(host, None)}
    except OSError:  # `bind` names the reason
        return socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6
