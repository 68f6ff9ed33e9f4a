"""Compile all programs of a model into a folder in advance: `jaxllm compile`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxllm.compiling import aot_manifest
from jaxllm.config import EngineConfig
from jaxllm.metrics import Metrics
from jaxllm.runner.runners import RUNNERS
from jaxllm.setup.model_setup import describe_programs, prepare


def compile_ahead(config: EngineConfig, folder: Path, progress: bool = False) -> int:
    """Compile every program into `folder`, without weights, with a manifest; return their number."""
    config = replace(config, precompile="all", compilation_cache_dir=str(folder))
    setup = prepare(config, needs_weights=False)
    folder.mkdir(parents=True, exist_ok=True)
    aot_manifest.path(folder, setup.spec).unlink(missing_ok=True)
    setup = prepare(config, needs_weights=False)
    runner = RUNNERS[type(setup.head)](config, setup, Metrics(), progress, needs_weights=False)
    try:
        record = describe_programs(config, setup, runner.memory_plan)
        aot_manifest.write(folder, setup.spec, record)
        return len(runner.programs)
    finally:
        runner.close()
