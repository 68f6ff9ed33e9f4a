"""Memory, open files, processor time and sockets of a process, from Linux's /proc."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"  # states of Linux's TCP sockets


class Socket(NamedTuple):
    """One TCP socket of a process; addresses in the kernel's hexadecimal format."""

    local: str
    port: int
    is_listening: bool


def resident_bytes(pid: int) -> int:
    """Return the anonymous memory of a process, including swap."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE))


@contextmanager
def growth(pid: int) -> Iterator[Callable[[], int]]:
    """Sample a process's memory while the block runs; yield a function that returns the largest growth in bytes."""
    before, most, end = resident_bytes(pid), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not end.wait(0.02):
            most = max(most, resident_bytes(pid) - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: most
    finally:
        end.set()
        thread.join()


def num_descriptors(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def bytes_read(pid: int) -> int:
    """Return the bytes that a process has read since its start, from files and sockets."""
    return int(re.findall(r"^rchar: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)[0])


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tcp_sockets(pid: int) -> list[Socket]:
    """Return the TCP sockets of a process."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # closed in between
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(match[1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append(Socket(address, int(port, 16), fields[3] == _LISTEN))
    return found
