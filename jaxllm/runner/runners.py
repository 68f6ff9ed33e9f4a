"""The table of runner classes, by type of head."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType

from jaxllm.model.pooler import Pooler
from jaxllm.runner.model_runner import Runner
from jaxllm.runner.pooling_runner import PoolingRunner

RUNNERS: Mapping[type, type[Runner]] = {NoneType: Runner, Pooler: PoolingRunner}
