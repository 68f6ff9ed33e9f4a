"""Reads a model's description from its folder: decoder, family and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.checkpoints.pooler_files import most_tokens, read_pooler
from jaxllm.checkpoints.stored_head import with_stored_head
from jaxllm.checkpoints.weights import read_config
from jaxllm.families.families import read_spec
from jaxllm.families.family import Family
from jaxllm.model.head import Head
from jaxllm.model.spec import Spec


@dataclass(frozen=True)
class Described:
    """A model's description."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    spec: Spec
    family: Family
    head: Head | None  # None: it generates

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt, unless a setting is lower."""
        longest = self.spec.max_position
        return longest if self.head is None else min(longest, most_tokens(self.folder) or longest)


def describe(
    folder: Path, max_model_len: int | None = None, runner: str = "auto", pooler_config: Mapping[str, Any] | None = None
) -> Described:
    """Read a model's config and pooler; the arguments after the folder are fields of `EngineConfig`."""
    config = read_config(folder)
    spec, family = read_spec(config, max_model_len)
    spec = with_stored_head(folder, spec, family)
    return Described(folder, config, spec, family, read_pooler(folder, config, spec, family, runner, pooler_config))
