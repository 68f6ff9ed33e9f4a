"""An Orbax checkpoint gives the weights of its source on 1, 2 and 4 devices of a process, and on 4 of two processes,
which hold parts of all layers, or are pipeline stages.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxllm.checkpoints import orbax_checkpoint
from jaxllm.commands.conversion import convert
from tests.hosts import group
from tests.hosts.orbax_restorer import pieces, restore
from tests.support.checkpoints import CONFIG, random_tensors, write_checkpoint
from tests.support.paths import GOLDEN

# Two key-value heads have copies on four devices, and the vocabulary is padded.
DENSE = CONFIG | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2047, "head_dim": 32}
WIDE = {"hidden_size": 256, "moe_intermediate_size": 512, "vocab_size": 2047, "num_attention_heads": 8}
EXPERTS = json.loads((GOLDEN / "qwen3-moe" / "config.json").read_text()) | WIDE
CASES: dict[str, tuple[dict[str, Any], bool, int]] = {
    "dense": (DENSE, False, 1),
    "stages": (DENSE, False, 2),
    "divided experts": (EXPERTS, False, 1),
    "whole experts": (EXPERTS, True, 1),
}


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_the_same_on_any_mesh_and_each_process_reads_its_part(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_checkpoint, "CHUNK_BYTES", 1 << 16)
    config, divides_experts, num_stages = CASES[case]
    source = write_checkpoint(tmp_path / "source", config, random_tensors(config))
    folder = convert(str(source), tmp_path / "target")
    for shards in (1, 2, 4):
        how = shards, divides_experts, num_stages if shards == 4 else 1
        expected = pieces(restore(source, *how))
        assert pieces(restore(folder, *how)) == expected
    address, module = group.free_address(), "tests.hosts.orbax_restorer"
    given = [address, str(folder), str(int(divides_experts)), str(num_stages)]
    env = group.environment()
    with (
        group.process(module, "0", *given, env=env, stdout=subprocess.PIPE) as first,
        group.process(module, "1", *given, env=env, stdout=subprocess.PIPE) as second,
    ):
        found: dict[str, str] = {}
        for each in (first, second):
            out, log = each.communicate(timeout=300)
            assert each.returncode == 0, log
            read, held, own = json.loads(out.splitlines()[-1])
            assert 0.9 < read / held < 1.25  # with the index and parts of chunks; the whole file has twice its bytes
            found |= own
    assert found == expected
