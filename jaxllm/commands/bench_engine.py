"""Flags and checks of engine benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from jaxllm.commands.arguments import add_model, engine_config
from jaxllm.commands.bench_results import add_output, check_output
from jaxllm.commands.flags import add_engine_flags, given
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError


def add_engine(parser: argparse.ArgumentParser, defaults: Mapping[str, Any], has_plot: bool = True) -> None:
    add_model(parser)
    add_output(parser, has_plot)
    add_engine_flags(parser.add_argument_group("engine"), defaults=given(defaults, EngineConfig))


def read_engine(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], EngineConfig]:
    options = {**defaults, **options}
    config = engine_config(options)
    check_output(options)
    return options, config


def check_context(config: EngineConfig, input_len: int, output_len: int) -> None:
    from jaxllm.setup.model_setup import prepare

    longest = prepare(config, needs_weights=False).max_model_len
    if input_len + output_len > longest:
        raise UserError(
            f"a prompt of {input_len} tokens with an output of {output_len} is longer than the model's context of "
            f"{longest}; lower --input-len or --output-len."
        )
