"""What a benchmark asks for, out of flags: `bench serve` and `bench throughput` share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from jaxllm.bench.workload import DatasetName, DatasetOptions
from jaxllm.commands.arguments import Usage, build
from jaxllm.commands.flags import flag_of, given


def dataset_options(options: Mapping[str, Any], dataset_name: DatasetName = "random") -> DatasetOptions:
    """Make `DatasetOptions` of the flags that were given; `dataset_name` is the dataset where none was.

    Raises:
        Usage: for a flag of another dataset than the one that is chosen, or a value that is refused.
    """
    own = given(options, DatasetOptions)
    chosen = own.get("dataset_name", dataset_name)
    for name in own:
        owner = next((dataset for dataset in get_args(DatasetName) if name.startswith(f"{dataset}_")), chosen)
        if owner != chosen:
            raise Usage(f"{flag_of(name, DatasetOptions)} is of the dataset {owner}; --dataset-name is {chosen}")
    return build(DatasetOptions, options, dataset_name=dataset_name)
