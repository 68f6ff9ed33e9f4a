"""Classifier heads for the families table."""

from __future__ import annotations

from jaxllm.families.config_fields import Fields
from jaxllm.families.family import HeadReader
from jaxllm.model.pooler import Activation, Dense, Pooler, Pooling


def one_product(fields: Fields, width: int, labels: int) -> Pooler:
    return Pooler("last", (Dense(labels, bias=False, stem="score"),))


def two_products(pooling: Pooling, inner: str, activation: Activation, outer: str) -> HeadReader:
    """Return a head of two products with an activation between, by tensor names."""

    def head(fields: Fields, width: int, labels: int) -> Pooler:
        return Pooler(pooling, (Dense(width, activation=activation, stem=inner), Dense(labels, stem=outer)))

    return head


OF_DECODERS = {  # by suffix of the architecture
    "ForSequenceClassification": one_product,
    "ForRewardModel": two_products("last", "score.0", "relu", "score.2"),
}
