"""Layouts without devices."""

from jax.sharding import AbstractMesh

from jaxllm.model.sharding import RULES, Layout


def layout_of(shards: int) -> Layout:
    """Return a layout with a number of shards and no devices."""
    return Layout(AbstractMesh((shards,), ("tp",)), RULES)
