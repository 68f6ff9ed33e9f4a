"""Evaluates the model of shapes on held-out pictures through the engine: `python -m training.evaluate_shapes`.

An answer is right if it is the one right text. The rates are written to the model's score.json.
"""

import argparse
from pathlib import Path

from jaxllm import LLM, SamplingParams
from jaxllm.embedded import SHAPES_DIR
from training import picture_questions, questions
from training.questions import Score

# Guaranteed rates.
PROMISED: dict[str, float] = dict.fromkeys([*picture_questions.ASKED, "fourth questions", "without a picture"], 0.95)
PROMISED |= {"all": 0.97}
PICTURES = 350
MOST_NEW_TOKENS = 80


def evaluate(llm: LLM, seed: int, pictures: int) -> Score:
    """Return the rate of right answers by kind, and of all questions about pictures."""
    asked = picture_questions.held_out_questions(seed, pictures)
    greedy = SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
    outputs = [each.outputs[0] for each in llm.chat([each.messages() for each in asked], greedy, use_tqdm=False)]
    own = [questions.Question(each.kind, [], each.turn.answer) for each in asked]
    scores = questions.score(own, [each.text for each in outputs], [str(each.finish_reason) for each in outputs])
    parts = [scores[kind] for kind in picture_questions.ASKED]
    right, count = (sum(int(part[name]) for part in parts) for name in ("right", "asked"))
    return scores | {"all": {"rate": round(right / count, 4), "right": right, "asked": count}}


def main() -> None:
    """Evaluate, print and write the score; exit with 1 if a rate is below its guarantee."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_shapes", description="Ask about pictures.")
    parser.add_argument("--model", type=Path, default=SHAPES_DIR, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures and questions")
    parser.add_argument("--limit", type=int, help=f"ask about this many pictures, not {PICTURES}, and write no score")
    options = parser.parse_args()
    with LLM(str(options.model)) as llm:
        scores = evaluate(llm, options.seed, options.limit or PICTURES)
    questions.report(scores, options, options.model, PROMISED, pictures=PICTURES)


if __name__ == "__main__":
    main()
