"""Evaluates the embedded model on held-out questions through the engine: `python -m training.evaluate`.

It prints how many answers are exactly right and writes them to score.json, which also has notes of the training. The
small sums are evaluated greedily and with the sampling of the model's generation_config.json.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from jaxllm import LLM, SamplingParams
from jaxllm.embedded import MODEL_DIR
from training.questions import Question, Score, add_arguments, chosen_questions, report, score, small_questions

# Guaranteed rates of the embedded model; a lower rate makes the command fail.
PROMISED: dict[str, float] = {
    **{"sums": 0.95, "facts": 0.98, "ends": 0.99, "small sums": 1.0, "small differences": 0.99},
    **{"drawn small sums": 0.99, "drawn small differences": 0.99},
}
MOST_NEW_TOKENS = 200
PASSES = range(0, 20, 4)  # the phrasings of all small sums when tokens are drawn


def answers_of_engine(
    llm: LLM, questions: list[Question], params: SamplingParams | list[SamplingParams]
) -> tuple[list[str], list[str]]:
    """Return the engine's answers and their finish reasons."""
    outputs = [answer.outputs[0] for answer in llm.chat([question.messages for question in questions], params)]
    return [output.text for output in outputs], [str(output.finish_reason) for output in outputs]


def drawn_score(llm: LLM, seed: int) -> Score:
    """Return the score of the small sums with the model's default sampling parameters."""
    questions = [question for first in PASSES for question in small_questions(first, "drawn small")]
    own = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=MOST_NEW_TOKENS)
    draws = [dataclasses.replace(own, seed=seed + number) for number in range(len(questions))]
    scores = score(questions, *answers_of_engine(llm, questions, draws))
    del scores["ends"]
    return scores


def main() -> None:
    """Evaluate, print and write the score; exit with 1 if a rate is below its guarantee."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Ask the held-out questions.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    add_arguments(parser)
    options = parser.parse_args()
    questions = chosen_questions(options)
    llm, greedy = LLM(str(options.model)), SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
    scores = score(questions, *answers_of_engine(llm, questions, greedy))
    if not options.limit:
        small = small_questions()
        scores = score(small, *answers_of_engine(llm, small, greedy)) | scores | drawn_score(llm, options.seed)
    path = options.model / "score.json"
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    noted.pop("scores", None)  # those of an earlier run
    report(scores, options, options.model, PROMISED, **noted | {"answered_by": "engine"})


if __name__ == "__main__":
    main()
