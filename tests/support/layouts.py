"""Layouts without devices."""

from jax.sharding import AbstractMesh

from jaxllm.model.sharding import RULES, Layout


def layout_of(shards: int) -> Layout:
    """Return a layout with a number of shards, for code that needs only their number."""
    return Layout(AbstractMesh((shards,), ("tp",)), RULES)
