"""The example of reinforcement learning raises the reward in a few steps, with trainer and engine connected by HTTP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.grpo import train
from jaxllm.config import config_of
from jaxllm_server.shared.options import ServerOptions
from tests.support.server_thread import ServerThread

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "num_kv_blocks": 512, "precompile": "covering"}


@pytest.mark.ci
def test_the_reward_rises(tmp_path: Path) -> None:
    options = ServerOptions(port=0, grpc_port=0, grpc_filter=False, weights_root=str(tmp_path))
    server = ServerThread(config_of(None, {"enable_sleep_mode": True, **SIZES}), options)
    try:
        rewards = train(server.url, tmp_path, steps=9)
    finally:
        server.close()
    assert np.mean(rewards[-2:]) > 2 * np.mean(rewards[:2]), rewards
