"""Serve one model over several nodes of a Ray cluster: each bundle of a placement group is a host of the group.

    pip install 'jaxllm[ray]'
    python examples/ray_hosts.py --hosts 2 --gpus 8 -- --model meta-llama/Llama-3.1-405B-Instruct \
        --tensor-parallel-size 16

Arguments after `--` are those of `jaxllm serve`. Ray reserves the processors and GPUs of all hosts at once, by default
on different nodes (`--strategy STRICT_SPREAD`). Host 0 serves; its address is printed. The hosts share a random secret.

If a node or a process is lost, the group ends within seconds (`--hang-timeout`), and a new placement group starts it
again, up to `--restarts` times. Ctrl-C and SIGTERM drain it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ENDING_SECONDS = 60.0  # after the first process of a group has ended, before the others are killed


@ray.remote(max_concurrency=2)
class Host:
    """A host of the group: runs `jaxllm serve` on the node of its bundle."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return this node's address with a port that is free, as the next one is."""
        node = ray.util.get_node_ip_address()
        while True:
            with ExitStack() as stack, suppress(OSError):
                port = stack.enter_context(socket.create_server((node, 0))).getsockname()[1]
                stack.enter_context(socket.create_server((node, port + 1)))
                return f"{node}:{port}"

    def serve(self, arguments: list[str], environment: dict[str, str]) -> int:
        """Run the server until it ends; return its exit code."""
        command = [sys.executable, "-m", "jaxllm", "serve", *arguments]
        self._process = subprocess.Popen(command, env={**os.environ, **environment})
        return self._process.wait()

    def stop(self) -> None:
        """Let the server end after its requests."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


class Group:
    """The hosts of one placement group."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._bundles = placement_group(
            [{"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}] * options.hosts,
            strategy=options.strategy,
        )
        if not self._bundles.wait(options.placement_timeout):
            remove_placement_group(self._bundles)
            raise SystemExit(
                f"error: Ray could not reserve {options.hosts} bundles of {options.cpus:g} CPUs and {options.gpus:g} "
                f"GPUs ({options.strategy}) in {options.placement_timeout:g} s; `ray status` shows the free ones."
            )
        self._hosts: list[Any] = [
            Host.options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, rank),
            ).remote()
            for rank in range(options.hosts)
        ]
        coordinator = ray.get(self._hosts[0].address.remote())
        self.node = coordinator.rpartition(":")[0]
        environment = {"JAXLLM_HOSTS_KEY": secrets.token_hex(32), **dict(options.env)}
        place = ["--num-hosts", str(options.hosts), "--coordinator", coordinator]
        self._runs = [
            host.serve.remote(
                [*options.serve, *place, "--host-rank", str(rank), *(["--headless"] if rank else [])], environment
            )
            for rank, host in enumerate(self._hosts)
        ]

    def wait(self) -> bool:
        """Wait until a process has ended, then for the others; return whether all ended without an error."""
        ray.wait(self._runs)
        ended, left = ray.wait(self._runs, num_returns=len(self._runs), timeout=ENDING_SECONDS)
        try:
            return not left and not any(ray.get(ended))
        except RayError:  # a node or an actor is lost
            return False

    def stop(self) -> None:
        """Let host 0 drain; the others end with it."""
        self._hosts[0].stop.remote()

    def remove(self) -> None:
        """Kill the processes that are left, and give the placement group back."""
        for host in self._hosts:
            ray.kill(host)
        remove_placement_group(self._bundles)


def main() -> int:
    """Read the command line, and serve until the group ends; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, required=True, help="number of hosts")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs per host (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per host (default: 0)")
    parser.add_argument(
        "--strategy", default="STRICT_SPREAD", choices=["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"],
        help="where Ray puts the bundles (default: each on another node)",
    )  # fmt: skip
    parser.add_argument(
        "--placement-timeout", type=float, default=600.0, help="seconds to wait for free nodes (default: 600)"
    )
    parser.add_argument("--restarts", type=int, default=3, help="starts after failures (default: 3)")
    parser.add_argument(
        "--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="environment of the servers"
    )
    parser.add_argument("--address", help="address of a Ray cluster (default: a running one, or a new one)")
    parser.add_argument("serve", nargs="*", metavar="ARGUMENT", help="after --: arguments of `jaxllm serve`")
    options = parser.parse_args()
    ray.init(address=options.address)
    stopped = False
    group: Group | None = None

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if group is not None:
            group.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for start in range(1 + options.restarts):
        group = Group(options)
        if stopped:
            group.stop()
        print(f"host 0 is at {group.node}", flush=True)
        was_right = group.wait()
        group.remove()
        if was_right or stopped:
            return int(not was_right)
        print(f"the group ended with an error (start {start + 1} of {1 + options.restarts})", flush=True)
        time.sleep(1.0)
    return 1


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
