"""The config.json files of published models, by name: `from tests.families.released import LLAMA_2_7B`.

They are copies from the hub; some omit keys without effect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxllm.families.families import read_spec
from jaxllm.model.spec import Spec

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("released_configs.json").read_text())


def __getattr__(name: str) -> dict[str, Any]:
    if name not in CONFIGS:
        raise AttributeError(name)
    return CONFIGS[name]


def spec_of(config: dict[str, Any], max_model_len: int | None = None) -> Spec:
    return read_spec(config, max_model_len)[0]
