"""Finds the neighbours of held-out sentences with the engine: `python -m training.evaluate_embedder`."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from training import meanings
from training.meanings import Text

PROMISED = 0.95
# Questions in words that were not trained, each with a part of the right answer.
BY_HAND: tuple[tuple[str, str], ...] = (
    ("Which town rules Japan?", "The capital of Japan"), ("capital poland", "The capital of Poland"),
    ("What should I speak when I travel to Brazil?", "Portuguese is spoken in Brazil"),
    ("I am going to Sweden, which money do I need?", "The currency of Sweden"),
    ("Is Kenya an African country?", "Kenya is in Africa"), ("the child of a sheep", "The young of a sheep"),
    ("animal with a bark", "A dog barks"), ("how many feet has an elephant got", "An elephant has four legs"),
    ("not rich", "The opposite of rich"), ("day following Tuesday", "Wednesday comes after Tuesday"),
    ("month ahead of June", "June comes after May"), ("minutes per hour", "There are 60 minutes in an hour"),
    ("place where the dragon lives", "The dragon lives in"), ("Emma's age is 12", "Emma is 12 years old"),
    ("honey bees hive", "keeps bees"), ("Leo can fix my bike", "Leo repairs bicycles"),
    ("Anna's job is baking", "Anna bakes bread"), ("the bear and the silver bell at the river",
     "The bear found a silver bell by the river"), ("a swimming owl", "The owl learned to swim"),
    ("color of bananas", "A banana is yellow"),
)  # fmt: skip


def neighbours(embed: Callable[[list[str]], np.ndarray], asked: list[str], world: list[Text]) -> list[Text]:
    """Return the sentence of the world that is nearest to each text."""
    return [world[best] for best in np.argmax(embed(asked) @ embed([text.text for text in world]).T, axis=1)]


def recall(embed: Callable[[list[str]], np.ndarray], asked: list[Text]) -> float:
    """Return the fraction of texts that are true of their nearest sentence in the world."""
    found = neighbours(embed, [text.text for text in asked], meanings.world())
    return sum(text.fits(near) for text, near in zip(asked, found, strict=True)) / len(asked)


def by_hand(embed: Callable[[list[str]], np.ndarray]) -> list[tuple[str, str, bool]]:
    """Return each free question, its nearest sentence, and whether that is the right one."""
    found = neighbours(embed, [question for question, _ in BY_HAND], meanings.world())
    return [(question, near.text, right in near.text) for (question, right), near in zip(BY_HAND, found, strict=True)]


def report(embed: Callable[[list[str]], np.ndarray]) -> str:
    """Return a line with the recall and the number of right free questions."""
    rate, free = recall(embed, meanings.held_out_pairs(0)), by_hand(embed)
    return f"held out {rate:.1%}, by hand {sum(right for *_, right in free)} of {len(free)}"


def main() -> None:
    """Embed with the engine, print the neighbours, and exit with 1 if the recall is below its guarantee."""
    from jaxllm import LLM
    from jaxllm.embedded import EMBEDDER_DIR

    parser = argparse.ArgumentParser(prog="python -m training.evaluate_embedder", description="Look for neighbours.")
    parser.add_argument("--model", type=Path, default=EMBEDDER_DIR, help="folder of the model")
    options = parser.parse_args()
    with LLM(str(options.model)) as llm:

        def embed(texts: list[str]) -> np.ndarray:
            return np.array([output.outputs.embedding for output in llm.embed(texts)])

        for question, near, is_right in by_hand(embed):
            print(f"{'right' if is_right else 'wrong'}  {question} -> {near}")
        print(report(embed))
        if recall(embed, meanings.held_out_pairs(0)) < PROMISED:
            raise SystemExit(f"recall is below {PROMISED}")


if __name__ == "__main__":
    main()
