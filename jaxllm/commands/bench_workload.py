"""The flags of what a benchmark asks for, which `bench serve` and `bench throughput` share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxllm.commands.arguments import Usage
from jaxllm.errors import UserError

_DATASETS = ("random", "sharegpt", "sonnet", "prefix_repetition", "custom", "timed_trace")
# Every field of DatasetOptions; written here again so that `--help` loads no numpy (a test compares them).
_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("dataset_path", str, "JSON of ShareGPT, lines of a poem, JSON lines of prompts or of a trace"),
    ("num_prompts", int, "requests (default: 1000)"),
    ("seed", int, "of prompts, lengths and arrivals (default: 0)"),
    ("input_len", int, "tokens of a prompt, for whichever dataset"),
    ("output_len", int, "tokens of an answer, for whichever dataset"),
    ("random_input_len", int, "tokens of a prompt after the prefix (default: 1024)"),
    ("random_output_len", int, "tokens of an answer (default: 128)"),
    ("random_range_ratio", float, "lengths differ by up to this share, both ways (default: 0)"),
    ("random_prefix_len", int, "tokens that all prompts begin with (default: 0)"),
    ("sharegpt_output_len", int, "tokens of an answer (default: those of the file's)"),
    ("sonnet_input_len", int, "most tokens of a prompt (default: 550)"),
    ("sonnet_output_len", int, "tokens of an answer (default: 150)"),
    ("sonnet_prefix_len", int, "tokens that all prompts begin with (default: 200)"),
    ("prefix_repetition_prefix_len", int, "tokens of a prefix (default: 256)"),
    ("prefix_repetition_suffix_len", int, "tokens after it (default: 256)"),
    ("prefix_repetition_num_prefixes", int, "different prefixes (default: 10)"),
    ("prefix_repetition_output_len", int, "tokens of an answer (default: 128)"),
    ("custom_output_len", int, "tokens of an answer where a line has no output_tokens (default: 256)"),
    ("timed_trace_unit", str, "of timestamps, ms or s (default: ms, as Mooncake's traces)"),
    ("timed_trace_block_size", int, "tokens that a hash id stands for (default: 512)"),
)


def add_dataset_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of a dataset; those that are not given stay out of the options."""
    group.add_argument("--dataset-name", choices=_DATASETS, default=argparse.SUPPRESS, help="(default: random)")
    for name, kind, text in _FLAGS:
        metavar = "FILE" if name == "dataset_path" else None
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--disable-shuffle", action="store_true", default=argparse.SUPPRESS, help="keep the order of the file"
    )
    group.add_argument(
        "--no-oversample",
        action="store_true",
        default=argparse.SUPPRESS,
        help="do not repeat prompts where the file has fewer than --num-prompts",
    )


def dataset_options(options: Mapping[str, Any], **defaults: Any) -> Any:
    """Make `DatasetOptions` of the flags that were given, and of `defaults` where they were not.

    Raises:
        Usage: for a flag of another dataset than the one that is chosen, or a value that is refused.
    """
    from jaxllm.bench.datasets import DatasetOptions

    given = {field.name: options[field.name] for field in fields(DatasetOptions) if field.name in options}
    chosen = given.get("dataset_name", defaults.get("dataset_name", "random"))
    for name in given:
        owner = next((dataset for dataset in _DATASETS if name.startswith(f"{dataset}_")), chosen)
        if owner != chosen:
            raise Usage(f"--{name.replace('_', '-')} is of the dataset {owner}; --dataset-name is {chosen}")
    try:
        return DatasetOptions(**{**defaults, **given})
    except UserError as error:
        message = str(error)
        for field in sorted(fields(DatasetOptions), key=lambda field: -len(field.name)):
            if "_" in field.name or message.startswith(f"{field.name} must"):
                message = message.replace(field.name, f"--{field.name.replace('_', '-')}")
        raise Usage(message) from error
