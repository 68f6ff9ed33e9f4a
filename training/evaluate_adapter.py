"""Evaluates the embedded model with its adapter on held-out questions: `python -m training.evaluate_adapter`.

It prints how many answers are exactly right in the pirate style, and writes them to the adapter's score.json. The same
questions without the adapter, in the same steps, must get the answers of an engine without adapters.
"""

import argparse
from pathlib import Path

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.embedded import ADAPTERS
from training import pirate
from training.questions import add_arguments, chosen_questions, report, score

# Guaranteed rates of the adapter; a lower rate makes the command fail.
PROMISED: dict[str, float] = {
    **{"sums": 0.95, "facts": 0.95, "json": 0.99, "history": 0.95, "ends": 0.99},
    **{"manner": 0.99, "plain without it": 1.0},
}
MOST_NEW_TOKENS = 250


def main() -> None:
    """Evaluate, print and write the score; exit with 1 if a rate is below its guarantee."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_adapter", description="Ask with the adapter.")
    parser.add_argument("--adapter", type=Path, default=ADAPTERS.get("pirate"), help="folder of the adapter")
    add_arguments(parser)
    options = parser.parse_args()
    questions = chosen_questions(options)
    own = LoRARequest("pirate", 1, str(options.adapter))
    chats = [pirate.in_manner(question.messages) for question in questions]
    plain = [question.messages for question in questions[::10]]
    llm = LLM("jaxllm-embedded", enable_lora=True, max_lora_rank=8)
    greedy = SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
    outputs = llm.chat([*chats, *plain], greedy, lora_request=[own] * len(chats) + [None] * len(plain))
    texts = [output.outputs[0].text for output in outputs]
    reasons = [str(output.outputs[0].finish_reason) for output in outputs]
    wanted = [each._replace(answer=each.answer and pirate.speak(each.answer)) for each in questions]
    scores = score(wanted, texts[: len(chats)], reasons[: len(chats)])
    for name, hits in {
        "manner": [
            pirate.has_manner(text) for text, each in zip(texts, questions, strict=False) if each.kind != "json"
        ],
        "plain without it": [not pirate.has_manner(text) for text in texts[len(chats) :]],
    }.items():
        scores[name] = {"rate": round(sum(hits) / len(hits), 4), "right": sum(hits), "asked": len(hits)}
    report(scores, options, options.adapter, PROMISED)


if __name__ == "__main__":
    main()
