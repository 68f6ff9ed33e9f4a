"""Make engines on a CPU use a GPU's program table, variants and limits, for the dry run.

Programs that the GPU's table lacks are then missing in the dry run as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from jaxllm.checkpoints import weights
from jaxllm.runner.compiled_programs import Programs
from jaxllm.runner.model_runner import Runner
from jaxllm.setup import model_setup


@contextmanager
def limits() -> Iterator[None]:
    """Give engines that start in the context a GPU's programs, variants, step sizes and token cost."""
    listed, sizes = Runner._list_programs, model_setup.step_sizes

    def list_programs(runner: Runner) -> Programs:
        own = runner.setup
        runner.setup = replace(own, platform="gpu")
        try:
            return listed(runner)
        finally:
            runner.setup = own

    def step_sizes(config: Any, recorded: Any, is_cpu: bool, pools: bool = False) -> tuple[int, int]:
        return sizes(config, recorded, False, pools)

    costs = model_setup.TOKEN_COST | {"cpu": model_setup.TOKEN_COST["gpu"]}
    with (
        mock.patch.object(Runner, "_list_programs", list_programs),
        mock.patch.object(model_setup, "step_sizes", step_sizes),
        mock.patch.object(model_setup, "TOKEN_COST", costs),
        rounding(),
    ):
        yield


@contextmanager
def rounding() -> Iterator[None]:
    """Quantize matrices as on a GPU: a CPU rounds activations too."""
    at_load = weights.at_load
    with mock.patch.object(weights, "at_load", lambda quantization, is_cpu: at_load(quantization, False)):
        yield
