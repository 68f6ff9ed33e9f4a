"""Heads of classifiers, as rows of the table of families name them."""

from __future__ import annotations

from jaxllm.families.config_fields import Fields
from jaxllm.families.family import HeadReader
from jaxllm.model.pooler import Activation, Dense, Pooler, Pooling


def one_product(fields: Fields, width: int, labels: int) -> Pooler:
    """Classify by the last token with one product."""
    return Pooler("last", (Dense(labels, bias=False, stem="score"),))


def two_products(pooling: Pooling, inner: str, activation: Activation, outer: str) -> HeadReader:
    """Classify by two products with an activation between, given the names of their tensors."""

    def head(fields: Fields, width: int, labels: int) -> Pooler:
        return Pooler(pooling, (Dense(width, activation=activation, stem=inner), Dense(labels, stem=outer)))

    return head


OF_DECODERS = {  # by the endings of architectures' names
    "ForSequenceClassification": one_product,
    "ForRewardModel": two_products("last", "score.0", "relu", "score.2"),
}
