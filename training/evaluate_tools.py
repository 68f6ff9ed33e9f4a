"""Evaluates the adapter "tools" on held-out questions: `python -m training.evaluate_tools`.

A call is right if it is the one call with the right name and arguments, character for character; an answer, which the
model gives after the result, if it is the one right sentence. The questions of evaluate.py are evaluated too, with the
adapter and without tools. The rates are written to the adapter's score.json.
"""

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.embedded import ADAPTERS
from training import facts, tool_calls
from training.questions import Score, add_arguments, chosen_questions, report, score
from training.tool_calls import ADD, TOOLS, WEATHER, Tool, ToolTurn

# Guaranteed rates of the adapter; a lower rate makes the command fail.
PROMISED: dict[str, float] = {
    **{f"{tool.name}: {what}": 0.95 for tool in TOOLS for what in ("calls", "answers", "both")},
    **{"second question: both": 0.9, "no tool: answers": 0.95},
    **{"sums": 0.95, "facts": 0.95, "json": 0.95, "ends": 0.99},
}
MOST_NEW_TOKENS = 200
Chat = tuple[list[Any], list[Tool]]


class Case(NamedTuple):
    """The messages so far, the tools, and the expected next turn."""

    kind: str
    before: list[dict[str, Any]]
    tools: list[Tool]
    turn: ToolTurn


def cases(seed: int) -> list[Case]:
    """Draw the questions for tools: 300 for each tool, 200 second ones in a chat, 100 with random words as a result."""
    rng = random.Random(f"tools {seed}")

    def turn_of(tool: Tool, only_written: bool = True) -> ToolTurn:
        phrasing, arguments = tool_calls.draw_held_out(rng, tool)
        result = str(sum(arguments)) if tool is ADD else tool_calls.draw_report(rng, only_written)
        return tool_calls.make_turn(tool, phrasing, arguments, result)

    def drawn(kind: str, turn: ToolTurn, before: list[dict[str, Any]]) -> Case:
        system = [{"role": "system", "content": tool_calls.draw_system(rng)}] if rng.random() < 0.5 else []
        return Case(kind, [*system, *before], rng.sample(TOOLS, len(TOOLS)), turn)

    own = [drawn(tool.name, turn_of(tool), []) for tool in TOOLS for _ in range(300)]
    for _ in range(200):
        own.append(drawn("second question", turn_of(rng.choice(TOOLS)), turn_of(rng.choice(TOOLS)).messages()))
    own += [drawn("any result", turn_of(WEATHER, only_written=False), []) for _ in range(100)]
    return own


class Asker:
    """The model with the adapter."""

    def __init__(self, adapter: Path) -> None:
        self._own = LoRARequest("tools", 1, str(adapter))
        self._llm = LLM("jaxllm-embedded", enable_lora=True)

    def ask(self, chats: list[Chat]) -> tuple[list[str], list[str]]:
        """Return the greedy next message of each chat, and its finish reason."""
        prompts = [
            self._llm.chat_prompt(chat, tools=[tool.schema() for tool in tools] or None, lora_request=self._own)
            for chat, tools in chats
        ]
        greedy = SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
        outputs = [each.outputs[0] for each in self._llm.generate(prompts, greedy, lora_request=self._own)]
        return [output.text for output in outputs], [str(output.finish_reason) for output in outputs]


def tool_score(asker: Asker, seed: int, limit: int | None) -> Score:
    """Evaluate the questions for tools; return for every kind how many calls, answers, and pairs of both are right."""
    asked = cases(seed)
    asked = asked[:: max(1, len(asked) // limit)] if limit else asked
    said, _ = asker.ask([(case.before + case.turn.messages()[:1], case.tools) for case in asked])
    answers, _ = asker.ask([(case.before + case.turn.messages()[:3], case.tools) for case in asked])
    tally: dict[str, list[bool]] = {}
    for case, call, answer in zip(asked, said, answers, strict=True):
        is_called = call == tool_calls.call_text(case.turn.name, case.turn.arguments)
        is_answered = answer == case.turn.answer
        for what, hit in {"calls": is_called, "answers": is_answered, "both": is_called and is_answered}.items():
            tally.setdefault(f"{case.kind}: {what}", []).append(hit)
        if not (is_called and is_answered):
            print(f"{case.kind}: {case.turn.question!r} gave {call!r}; {case.turn.result!r} gave {answer!r}")
    needless = facts.FACTS[:: 4 if not limit else 40]
    questions = [facts.capitalised(facts.held_out_phrasing(fact)) for fact in needless]
    texts, _ = asker.ask([([{"role": "user", "content": each}], [*TOOLS]) for each in questions])
    tally["no tool: answers"] = [text == fact.answer for text, fact in zip(texts, needless, strict=True)]
    return {
        kind: {"rate": round(sum(hits) / len(hits), 4), "right": sum(hits), "asked": len(hits)}
        for kind, hits in tally.items()
    }


def main() -> None:
    """Evaluate, print and write the score; exit with 1 if a rate is below its guarantee."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_tools", description="Ask for tools.")
    parser.add_argument("--adapter", type=Path, default=ADAPTERS.get("tools"), help="folder of the adapter")
    add_arguments(parser)
    options = parser.parse_args()
    asker = Asker(options.adapter)
    scores = tool_score(asker, options.seed, options.limit)
    questions = chosen_questions(options)
    scores |= score(questions, *asker.ask([(question.messages, []) for question in questions]))
    report(scores, options, options.adapter, PROMISED)


if __name__ == "__main__":
    main()
