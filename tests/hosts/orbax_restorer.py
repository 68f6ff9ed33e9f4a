"""One of two processes that restore an Orbax checkpoint.

Arguments: rank, address, the checkpoint's folder, 1 to give each device whole experts, and the number of pipeline
stages. It prints a JSON list: the bytes that it read, those that its devices hold, and a hash of each piece by its
weight's name and place.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxllm.checkpoints import weights
from jaxllm.config import EngineConfig
from jaxllm.families.families import read_spec
from jaxllm.hosts.agreement import start_devices
from jaxllm.hosts.settings import HostSettings
from jaxllm.model import stages
from jaxllm.model.sharding import make_layout


def bytes_read() -> int:
    """Return the bytes that Orbax has read from files."""
    (metric,) = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


def restore(folder: Path, shards: int, divides_experts: bool, num_stages: int = 1) -> Any:
    spec, family = read_spec(weights.read_config(folder))
    division = stages.divide(spec, num_stages)
    layout = make_layout(jax.devices(), shards // num_stages, divides_experts, division)
    return weights.load(folder, spec, family, layout, "float32")


def pieces(params: Any) -> dict[str, str]:
    """Return a hash of each piece that this process holds, by the weight's name and the piece's place."""
    return {
        f"{jax.tree_util.keystr(path)} {shard.index}": sha256(np.asarray(shard.data).tobytes()).hexdigest()
        for path, leaf in jax.tree.leaves_with_path(params)
        for shard in leaf.addressable_shards
    }


def main(rank: str, address: str, folder: str, divides_experts: str, num_stages: str) -> None:
    config = EngineConfig(model=folder, device="cpu", tensor_parallel_size=4)
    start_devices(config, HostSettings(num_hosts=2, rank=int(rank), coordinator=address))
    params = restore(Path(folder), 4, bool(int(divides_experts)), int(num_stages))
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    print(json.dumps([bytes_read(), held, pieces(params)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
