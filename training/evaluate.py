"""Asks the embedded model the held-out questions through the engine: `python -m training.evaluate`.

It prints how many answers are exactly right and writes them to score.json, beside what the training noted there.
"""

import argparse
import json
from pathlib import Path

from jaxllm import LLM, SamplingParams
from jaxllm.embedded import MODEL_DIR
from training.questions import Question, add_arguments, chosen_questions, report, score

# What the project promises of the embedded model; a lower rate makes the command fail.
PROMISED: dict[str, float] = {"sums": 0.95, "facts": 0.98, "ends": 0.99}
MOST_NEW_TOKENS = 200


def answers_of_engine(model: Path, questions: list[Question]) -> tuple[list[str], list[str]]:
    """Return the greedy answers of the engine and why each of them ended."""
    llm = LLM(str(model))
    greedy = SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
    outputs = [answer.outputs[0] for answer in llm.chat([question.messages for question in questions], greedy)]
    return [output.text for output in outputs], [str(output.finish_reason) for output in outputs]


def main() -> None:
    """Ask, print and write the score; exit with 1 where it is below what is promised."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Ask the held-out questions.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    add_arguments(parser)
    options = parser.parse_args()
    questions = chosen_questions(options)
    answers, reasons = answers_of_engine(options.model, questions)
    scores = score(questions, answers, reasons)
    path = options.model / "score.json"
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    report(scores, options, options.model, PROMISED, **noted | {"answered_by": "engine"})


if __name__ == "__main__":
    main()
