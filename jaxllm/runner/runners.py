"""The table of runner classes: one for models that generate, one for those that pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType

from jaxllm.model.pooler import Pooler
from jaxllm.runner.model_runner import Runner
from jaxllm.runner.pooling_runner import PoolingRunner

RUNNERS: Mapping[type, type[Runner]] = {NoneType: Runner, Pooler: PoolingRunner}
