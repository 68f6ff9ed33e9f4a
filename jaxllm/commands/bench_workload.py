"""Dataset options of `bench serve` and `bench throughput`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from jaxllm.bench.workload import DatasetName, DatasetOptions
from jaxllm.commands.arguments import UsageError, build
from jaxllm.commands.flags import flag_of, given


def dataset_options(options: Mapping[str, Any], dataset_name: DatasetName = "random") -> DatasetOptions:
    """Read the dataset's flags; raise `UsageError` for invalid ones or another dataset's."""
    own = given(options, DatasetOptions)
    chosen = own.get("dataset_name", dataset_name)
    for name in own:
        owner = next((dataset for dataset in get_args(DatasetName) if name.startswith(f"{dataset}_")), chosen)
        if owner != chosen:
            raise UsageError(f"{flag_of(name, DatasetOptions)} requires --dataset-name {owner}, got {chosen}")
    return build(DatasetOptions, options, dataset_name=dataset_name)
