"""The embedder's training text: pairs with the same meaning, no evaluation texts among them; and the trained model."""

import itertools
import random

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.embedded import EMBEDDER_DIR
from training import evaluate_embedder, meanings
from training.meanings import KINDS, Text


def pairs(seed: int, count: int) -> list[tuple[Text, Text]]:
    return list(itertools.islice(meanings.pairs(random.Random(seed)), count))


def test_same_seed_gives_same_pairs() -> None:
    assert pairs(7, 100) == pairs(7, 100) != pairs(8, 100)


def test_both_sentences_of_a_pair_say_the_same() -> None:
    for first, second in pairs(1, 3000):
        assert first.fits(second) and second.named >= first.named - ({0} if first.kind == "count" else set())


def test_what_is_evaluated_is_not_in_the_training() -> None:
    held_out = meanings.held_out_pairs(0)
    assert held_out == meanings.held_out_pairs(0) and len({text.text for text in held_out}) == 200
    assert {text.kind for text in held_out} >= set(KINDS) - {"count"}
    usual = {text.text for text in meanings.world()}
    trained = {text.text.rstrip(".?").lower() for pair in pairs(2, 30_000) for text in pair}
    assert len(trained) > 20_000
    assert not [text for text in held_out if text.text in usual or text.text.rstrip(".?").lower() in trained]


def test_every_meaning_has_a_sentence_of_its_own() -> None:
    world = meanings.world()
    assert len({text.text for text in world}) == len({(text.kind, text.row) for text in world}) == len(world) > 10_000
    assert {"Anna keeps bees.", "The Netherlands is in Europe.", "May comes after April."} <= {t.text for t in world}


def test_what_fits_is_no_negative() -> None:
    """The training compares numbers; this test compares words, with the same result."""
    from training.train_embedder import fitting

    texts = [text for pair in pairs(3, 200) for text in pair]
    expected = [[a.fits(b) or b.fits(a) for b in texts] for a in texts]
    assert np.array_equal(fitting(texts), expected)


@pytest.mark.slow
def test_the_embedder_finds_what_is_meant() -> None:
    with LLM(str(EMBEDDER_DIR)) as llm:

        def embed(texts: list[str]) -> np.ndarray:
            return np.stack([output.outputs.data for output in llm.encode(texts, pooling_task="embed", use_tqdm=False)])

        assert evaluate_embedder.recall(embed, meanings.held_out_pairs(1)) >= evaluate_embedder.PROMISED
        assert sum(is_right for *_, is_right in evaluate_embedder.by_hand(embed)) >= 12
