"""A process's place in a group."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jaxllm.errors import UserError

KEY_VARIABLE = "JAXLLM_HOSTS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """The leader listens at `coordinator`, JAX's service at the next port.

    The leader listens at `coordinator`, JAX's service at the next port. `silence`: seconds without a message, until a
    process counts as lost.
    """

    num_hosts: int
    rank: int
    coordinator: str  # HOST:PORT
    silence: float = 8.0

    def __post_init__(self) -> None:
        if self.num_hosts < 2:
            raise UserError(f"num_hosts must be at least 2, got {self.num_hosts}.", "num_hosts")
        if not 0 <= self.rank < self.num_hosts:
            raise UserError(
                f"host_rank must be from 0 to {self.num_hosts - 1} (num_hosts - 1), got {self.rank}.", "host_rank"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port[:9]) < 65535:
            raise UserError(
                f"coordinator must be HOST:PORT with a port below 65535, got {self.coordinator!r:.80}.", "coordinator"
            )

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def key(self) -> bytes:
        """The shared secret; empty without the environment variable."""
        return os.environ.get(KEY_VARIABLE, "").encode()
