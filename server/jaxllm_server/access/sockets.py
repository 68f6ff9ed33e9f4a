"""The listening sockets of both front ends."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError

BACKLOG = 2048
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as ::1 with IPv6 disabled


def check_uds(path: str, flag: str) -> None:
    """Remove a dead process's socket file; raise UserError if a server listens on it; leave other files."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full backlog raises BlockingIOError
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


def listen(host: str, port: int | None, uds: str | None, names: tuple[str, str, str]) -> list[socket.socket]:
    """Return listening sockets: one for a Unix path, else one with the same port on each address of the host.

    `names` are the front end's name and two flags. Raises UserError for an unusable address.
    """
    name, port_flag, uds_flag = names
    try:
        if uds is None:
            return _on_each_address(host, port or 0)
        check_uds(uds, uds_flag)
        return [_listening(socket.AF_UNIX, uds)]
    except OSError as error:
        where, flag = (f"{host}:{port}", port_flag) if uds is None else (uds, uds_flag)
        reason = "its folder is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        message = f"{name} cannot listen on {where}: {reason}. Choose another --{flag.replace('_', '-')}."
        raise UserError(message, flag) from error


def _on_each_address(host: str, port: int) -> list[socket.socket]:
    """Listen on each available address of a host; port 0 lets the system choose a common one."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found = dict.fromkeys((family, address) for family, _, _, _, address in infos)
    missing: list[OSError] = []
    with ExitStack() as opened:
        listening: list[socket.socket] = []
        for family, (name, _, *scope) in found:
            try:
                listener = _listening(family, (name, port, *scope), only_ipv6=len(found) > 1)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing.append(error)
                continue
            listening.append(opened.enter_context(listener))
            port = listener.getsockname()[1]
        if not listening:
            raise missing[0]
        opened.pop_all()
    return listening


def _listening(family: int, address: Any, only_ipv6: bool = False) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if only_ipv6 and family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        if family == socket.AF_UNIX:
            Path(address).chmod(0o700)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
