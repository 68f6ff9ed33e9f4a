"""Parts of a group without devices: keys, agreement, settings, restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import UserError
from jaxllm.hosts import agreement, link, restart
from jaxllm.hosts.agreement import Offer
from jaxllm.hosts.link import Link, RefusedError
from jaxllm.hosts.settings import HostSettings
from jaxllm.setup.model_setup import of_each_host
from tests.support.paths import ROOT


def meet(leaders_key: bytes, followers_key: bytes, rank: int = 1, num_hosts: int = 2) -> tuple[Any, Any]:
    """Greet; return each end's result or exception."""
    ends = [Link(each) for each in _sockets()]
    found: list[Any] = [None, None]

    def follow() -> None:
        try:
            found[1] = link.greet(ends[1], followers_key, rank, num_hosts)
        except Exception as error:
            found[1] = error

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        found[0] = link.accept(ends[0], leaders_key, 2)
    except Exception as error:
        found[0] = error
        ends[0].close()
    thread.join(10.0)
    for end in ends:
        end.close()
    return found[0], found[1]


def _sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return listener.accept()[0], one


def test_only_processes_of_the_group_are_let_in() -> None:
    assert meet(b"k", b"k") == (1, None)
    for given, why in (
        ((b"k", b"another"), "JAXLLM_HOSTS_KEY"),
        ((b"k", b"k", 2), "rank 2 of 2 hosts"),
        ((b"k", b"k", 1, 3), "rank 1 of 3 hosts"),
    ):
        leader, follower = meet(*given)
        assert isinstance(leader, RefusedError) and isinstance(follower, RefusedError)
        assert why in str(leader) and why in str(follower)


def test_frames_are_bounded_and_checked() -> None:
    raw, end = _sockets()
    one, other = Link(raw), Link(end)
    other.greeted(1.0)
    for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x05"):
        raw.sendall(data)
        with pytest.raises(ValueError, match="frame"):
            other.receive()
    one.send("a", 1, b"b", None)
    assert other.receive() == ["a", 1, b"b", None]
    one.close()
    with pytest.raises(EOFError):
        other.receive()


def test_the_least_is_agreed_and_differences_are_named() -> None:
    same = {"dtype": "'float32'", "seed": "0"}
    assert agreement.least([Offer(same, 30, 512), Offer(same, 20, 900)]) == (20, 512)
    with pytest.raises(UserError, match=r"host 1 differs from host 0: seed is 1, not 0\. Make"):
        agreement.least([Offer(same, 30, 512), Offer(same | {"seed": "1"}, 30, 512)])


def test_devices_are_shared_out_evenly() -> None:
    devices = [SimpleNamespace(process_index=host, id=at) for host in (0, 1) for at in range(3)]
    assert [(each.process_index, each.id) for each in of_each_host(devices, 4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for count in (1, 3, 8):
        with pytest.raises(UserError, match="tensor_parallel_size"):
            of_each_host(devices, count)


@pytest.mark.parametrize(
    ("given", "parameter"),
    [({"num_hosts": 1}, "num_hosts"), ({"rank": 2}, "host_rank"), ({"coordinator": "a:65535"}, "coordinator")],
)
def test_settings_are_checked(given: dict[str, Any], parameter: str) -> None:
    with pytest.raises(UserError) as caught:
        HostSettings(**({"num_hosts": 2, "rank": 0, "coordinator": "host:5"} | given))
    assert caught.value.parameter == parameter


def test_a_failed_or_stopped_child_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first run fails, the second is stopped and killed, the third ends well."""
    monkeypatch.setattr(restart, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    runs = tmp_path / "runs"
    code = (
        "import os, signal, sys; file = open(sys.argv[1], 'a'); print('.', file=file, flush=True); "
        "run = open(sys.argv[1]).read().count('.'); "
        "run == 2 and os.kill(os.getpid(), signal.SIGSTOP); sys.exit(run == 1)"
    )
    began = time.monotonic()
    assert restart.keep_running([sys.executable, "-c", code, str(runs)], 0.3) == 0
    assert runs.read_text().count(".") == 3
    assert time.monotonic() - began < 20.0


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = (
        "import os, sys, time; from jaxllm.hosts import restart; restart.end_with_parent(); "
        "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
    )
    command = f"[sys.executable, '-c', {child!r}, {str(note)!r}]"
    parent = f"import sys; from jaxllm.hosts import restart; restart.keep_running({command}, 9)"
    with subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        end = time.monotonic() + 30.0
        while not (note.exists() and note.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
    number = int(note.read_text())
    while Path(f"/proc/{number}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()
