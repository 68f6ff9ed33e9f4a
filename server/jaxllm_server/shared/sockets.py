"""Unix sockets that either front end listens on: whether a path is free. Knows no protocol."""

from __future__ import annotations

import socket
from pathlib import Path

from jaxllm.errors import UserError


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
