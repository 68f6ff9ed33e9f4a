"""A constrained answer with optional tools and reasoning: every finished output is a valid answer or valid calls.

Outputs are random walks through the real grammars. The real parsers read them as streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxllm import embedded
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_output.constraint import Constraint
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm_server.generation.calls import Call
from jaxllm_server.parsers.harmony import CHANNEL
from jaxllm_server.parsers.table import REASONING_PARSERS, TOOL_PARSERS
from tests.server.generation.test_forced_calls import MESSAGES, NUMBER, FakeEngine, serving, tool
from tests.structured_output.draws import Drawing, bits

TOOLS = [
    tool("add", parameters=NUMBER, strict=True),
    tool("now"),
    tool("say", parameters={"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "number"}}}),
]
ANSWER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ANSWERS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"json": ANSWER}, lambda text: jsonschema.Draft202012Validator(ANSWER).is_valid(json.loads(text))),
    "regex": ({"regex": "[a-z <]{3,6}"}, lambda text: re.fullmatch("[a-z <]{3,6}", text) is not None),
    "object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}
OF_A_FAMILY = {
    "hermes": "qwen3", "qwen3_coder": "qwen3", "kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_r1", "granite": "granite",
    "deepseek_v31": "deepseek_v3", "mistral": "mistral", "openai": "openai_gptoss", "glm45": "glm45",
    "minimax_m2": "minimax_m2", "seed_oss": "seed_oss",
}  # fmt: skip
OF_JSON = {"hermes", "llama3_json", "mistral", "granite", "deepseek_v3", "deepseek_v31", "kimi_k2", "openai"}
# Written now and then where they are allowed, because random text rarely ends by itself.
CLOSERS = r"""
    " </parameter> </arg_value> ] ) } <｜tool▁calls▁end｜> <|tool_calls_section_end|> </
""".split()
STARTS = {style: getattr(form.form, "starts", ("",))[0] for style, form in REASONING_PARSERS.items()}


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    tokenizer = load_tokenizer(embedded.MODEL_DIR)
    assert tokenizer.eos_token_id is not None
    return Drawing(tokenizer, tokenizer.eos_token_id)


class DrawingEngine(FakeEngine):
    """Answers with a random output that the constraint allows."""

    def __init__(self, drawing: Drawing, rng: random.Random, prompt: str) -> None:
        super().__init__(prompt)
        self.drawing, self.rng = drawing, rng
        self.model.tokenizer = SimpleNamespace(**{**vars(self.model.tokenizer), "chat_templates": {}})

    def _token(self, constraint: Constraint, script: bytearray) -> int:
        self.drawing.grammars.fill([(constraint, 0)], self.drawing.mask)
        allowed = bits(self.drawing.mask[0])
        assert len(allowed), constraint.error
        piece = self.drawing.tokenizer.piece
        fitting = [each for each in allowed.tolist() if each != self.drawing.eos and script.startswith(piece(each))]
        if fitting:
            token = max(fitting, key=lambda each: len(piece(each)))
            del script[: len(piece(token))]
            return token
        script.clear()
        if len(constraint.matchers) > 1:  # choose both alternatives equally often
            mask = np.frombuffer(self.rng.choice(constraint.matchers).compute_bitmask(), np.int32)
            allowed = np.intersect1d(allowed, bits(mask))
        return self.rng.choices(allowed.tolist(), self.drawing.weights[allowed].tolist())[0]

    def _draw(self, asked: StructuredOutputsParams) -> list[int] | None:
        constraint = self.drawing.grammars.compile(asked).begin()
        opening = self.rng.choice(["", *asked.may_open_with])
        channel = self.rng.choice(["analysis<|message|>", "commentary", "", ""]) if opening == CHANNEL else ""
        script = bytearray((opening + channel).encode())
        marks = [*asked.marks, *(mark for mark, _ in asked.or_grammar_after)]
        ids: list[int] = []
        for number in range(300):
            if not script and not constraint.is_active and self.rng.random() < 0.3:
                script = bytearray(self.rng.choice(marks).encode())
            elif not script and number > 20 and self.rng.random() < 0.3:
                script = bytearray(self.rng.choice(CLOSERS).encode())
            token = self._token(constraint, script)
            constraint.consume(token)
            assert constraint.error is None, constraint.error
            if token == self.drawing.eos:
                return ids
            ids.append(token)
        return None

    async def generate(self, prompt: Any, params: SamplingParams, *_: Any, **__: Any) -> Any:
        assert params.structured_outputs is not None
        self.asked.append(params)
        ids = self._draw(params.structured_outputs)
        self.said = "" if ids is None else self.drawing.read(ids)
        at = 0
        while ids is not None and at <= len(self.said):
            end = at + self.rng.randrange(1, 9)
            is_over = end > len(self.said)
            output = CompletionOutput(0, self.said[at:end], [5], finish_reason="stop" if is_over else None)
            yield RequestOutput("r", None, [1], [output], finished=is_over)
            at = end


async def _read(own: Any, call: Call) -> tuple[str, str, list[tuple[str, str]]]:
    text, reasoning, calls = "", "", []
    async for chunk in own.generate(call):
        for part in chunk.outputs:
            text, reasoning = text + part.text, reasoning + part.reasoning
            for each in part.tool_calls:
                if each.name is not None:
                    calls.append((each.name, each.arguments))
                else:
                    calls[-1] = calls[-1][0], calls[-1][1] + each.arguments
    return text, reasoning, calls


def _judge(drawing: Drawing, style: str, seeds: range) -> None:
    seen = {"call": 0, "answer": 0, "thought": 0}
    for seed in seeds:
        rng = random.Random(f"{style} {seed}")
        thinks = OF_A_FAMILY.get(style) if style == "openai" or rng.random() < 0.5 else None
        prompt = rng.choice(["a", f"a {STARTS[thinks]}", f"{STARTS[thinks]} a"] if thinks else ["a"])
        engine = DrawingEngine(drawing, rng, prompt)
        own = serving(engine, tool_call_parser=style, reasoning_parser=thinks)  # type: ignore[arg-type]
        asked, judge = ANSWERS[rng.choice(list(ANSWERS))]
        is_single = rng.random() < 0.3
        call = Call(
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=rng.choice([None, "auto"]),
            takes_one_call=is_single,
            sampling={"structured_outputs": asked, "max_tokens": 9},
            stream=True,
        )
        text, reasoning, calls = asyncio.run(_read(own, call))
        if not engine.said:
            continue
        said = (engine.said, text, reasoning, calls)
        seen["thought"] += bool(reasoning)
        if calls:
            seen["call"] += 1
            assert not text.strip() and not (is_single and len(calls) > 1), said
            for name, arguments in calls:
                assert name in ("add", "now", "say") and isinstance(json.loads(arguments), dict), said
                if name == "add" and style in OF_JSON:
                    assert jsonschema.Draft202012Validator(NUMBER).is_valid(json.loads(arguments)), said
        else:
            seen["answer"] += 1
            assert judge(text), said
    assert seen["call"] and seen["answer"] and (seen["thought"] or style not in OF_A_FAMILY), seen


@pytest.mark.parametrize("style", {form.parser: style for style, form in reversed(TOOL_PARSERS.items())}.values())
def test_what_ends_is_an_answer_of_its_form_or_calls(drawing: Drawing, style: str) -> None:
    _judge(drawing, style, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("style", TOOL_PARSERS)
def test_what_ends_is_an_answer_of_its_form_or_calls_many_times(drawing: Drawing, style: str) -> None:
    _judge(drawing, style, range(12, 500))
