"""Generate numbered requests with and without a constraint, and check their outputs independently of the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np

from jaxllm import RequestOutput, SamplingParams
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.outputs import CompletionOutput, Logprob
from jaxllm.text import detokenizer
from jaxllm.text.tokenizer import Tokenizer
from tests.support import paths

SHARE = 0.2  # fraction of the parameters that a request sets
PLAIN = 0.3  # fraction of the requests without a constraint
VOCABULARY = 512  # vocabulary size of the stories model
MARKER = "."

FLAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "is_good": {"type": "boolean"},
        "kind": {"enum": ["a little girl", "a little dog", "a big, red ball"]},
    },
    "required": ["name", "is_good", "kind"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "minItems": 1, "maxItems": 3}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node",
}
CHOICE = ("yes", "yes, please", "no", "She was happy", "One day, she saw a big, red ball", "été")
LARK = 'start: "once " NOUN (" and " NOUN)* "."\nNOUN: /(the|a) [a-z]{1,5}/\n'
LARK_TEXT = r"once (the|a) [a-z]{1,5}( and (the|a) [a-z]{1,5})*\."
EBNF = 'root ::= "<" [a-c]+ ">" root? | "!"\n'
EBNF_TEXT = r"(<[a-c]+>)+|(<[a-c]+>)*!"
ANY_OBJECT = {"type": "object"}

Judge = Callable[[str], bool]


def _is_json(schema: Any) -> Judge:
    judge = jsonschema.Draft202012Validator(schema)

    def is_valid(text: str) -> bool:
        try:
            return judge.is_valid(json.loads(text))
        except ValueError:
            return False

    return is_valid


def _matches(pattern: str) -> Judge:
    return lambda text: re.fullmatch(pattern, text) is not None


KINDS: dict[str, tuple[dict[str, Any], Judge]] = {
    "flat": ({"json": FLAT}, _is_json(FLAT)),
    "compact": ({"json": FLAT, "disable_any_whitespace": True}, _is_json(FLAT)),
    "list": ({"json": LIST, "whitespace_pattern": " ?"}, _is_json(LIST)),
    "tree": ({"json": TREE, "disable_additional_properties": True}, _is_json(TREE)),
    "regex": ({"regex": r"[A-Z][a-z]{2,6}( [a-z]+){0,3}\."}, _matches(r"[A-Z][a-z]{2,6}( [a-z]+){0,3}\.")),
    "date": ({"regex": r"\d{4}-\d{2}-\d{2}T(?:00|12):30"}, _matches(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:00|12):30")),
    "choice": ({"choice": CHOICE}, CHOICE.__contains__),
    "lark": ({"grammar": LARK}, _matches(LARK_TEXT)),
    "ebnf": ({"grammar": EBNF}, _matches(EBNF_TEXT)),
    "object": ({"json_object": True}, _is_json(ANY_OBJECT)),
    "after": ({"choice": CHOICE, "begin_after": MARKER}, CHOICE.__contains__),
}
WORDS = ["the", " the", "was", "a", "e", '"', "}", " and", "true", ":", "Once upon", "little girl"]


@dataclass(frozen=True)
class Asked:
    """Describe a request of the matrix."""

    prompt: list[int]
    params: SamplingParams
    kind: str | None  # a member of KINDS
    aborted_in: int | None  # the step after which it is aborted


def asked(number: int) -> Asked:
    random = np.random.default_rng([number, 7])
    kind = None if random.random() < PLAIN else str(random.choice([*KINDS]))
    values = _random_values(random)
    used = {name: value for name, value in values.items() if random.random() < SHARE}
    used |= {name: values[name] for name in ("seed", "temperature", "max_tokens")}
    if used["temperature"] == 0.0:
        used.pop("n", None)
    if "min_tokens" in used:
        used["min_tokens"] = min(used["min_tokens"], used["max_tokens"])
    if kind is not None:
        used["structured_outputs"] = KINDS[kind][0]
    aborted_in = int(random.integers(1, 60)) if random.random() < 0.1 else None
    return Asked(_prompt(random), SamplingParams(**used), kind, aborted_in)


def _random_values(random: np.random.Generator) -> dict[str, Any]:
    def ids(most: int) -> list[int]:
        return random.integers(3, VOCABULARY, random.integers(1, most + 1)).tolist()

    def words(most: int) -> list[str]:
        return random.choice(WORDS, random.integers(1, most + 1)).tolist()

    return {
        "n": int(random.integers(2, 4)),
        "seed": int(random.integers(-(2**63), 2**63)),
        "temperature": float(random.choice([0.0, 1.0, 1.0])),
        "top_p": float(random.uniform(0.5, 1.0)),
        "top_k": int(random.integers(5, 60)),
        "max_tokens": int(random.choice([1, 12, 60, 100, 100])),
        "min_tokens": int(random.integers(0, 12)),
        "presence_penalty": float(random.uniform(-1, 2)),
        "frequency_penalty": float(random.uniform(-1, 2)),
        "repetition_penalty": float(random.uniform(0.8, 1.4)),
        "logit_bias": {token: float(random.uniform(-5, 5)) for token in ids(30)},
        "allowed_token_ids": [token for token in range(VOCABULARY) if token not in ids(200)],
        "bad_words": words(3),
        "logprobs": int(random.choice([0, 1, 5])),
        "prompt_logprobs": int(random.choice([0, 2])),
        "stop": words(2),
        "stop_token_ids": ids(10),
        "ignore_eos": True,
        "repetition_detection": {"max_pattern_size": int(random.integers(1, 4)), "min_count": 3},
    }


def _prompt(random: np.random.Generator) -> list[int]:
    with np.load(paths.STORIES / "golden.npz") as stored:
        story = [*stored["prompt"].tolist(), *stored["tokens"].tolist()]
    start = 4 * int(random.integers(0, 3))  # few different prefixes, so that requests share blocks
    return story[start : start + int(random.integers(1, 50))]


def run(engine: LLMEngine, numbers: Iterator[int] | list[int] | range, aborts: bool) -> dict[int, RequestOutput]:
    """Run requests together and return the last output of each; the requests in `aborts` are aborted on the way."""
    requests = {number: asked(number) for number in numbers}
    for number, request in requests.items():
        engine.add_request(str(number), request.prompt, request.params)
    ended: dict[int, RequestOutput] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        num_steps += 1
        going = [name for name, request in requests.items() if aborts and request.aborted_in == num_steps]
        outputs += engine.abort_request([str(name) for name in going])
        ended |= {int(output.request_id): output for output in outputs if output.finished}
    return ended


def check_equal(number: int, busy: RequestOutput, alone: RequestOutput) -> None:
    """Compare an output with that of the same request run alone; an aborted output must be a prefix of it."""
    for one, other in zip(busy.outputs, alone.outputs, strict=True):
        if "abort" in (one.finish_reason, other.finish_reason):
            assert one.token_ids == other.token_ids[: len(one.token_ids)], (number, asked(number))
            assert len(one.text) <= len(other.text) and other.text.startswith(one.text.rstrip("\ufffd")), number
            continue
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "seed"):
            assert getattr(one, name) == getattr(other, name), (number, name, asked(number))
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            np.testing.assert_allclose(_values(mine), _values(theirs), atol=1e-4)
    if all(one.finish_reason != "abort" for one in busy.outputs):
        for mine, theirs in zip(busy.prompt_logprobs or (), alone.prompt_logprobs or (), strict=True):
            np.testing.assert_allclose(_values(mine), _values(theirs), atol=1e-4)


def _values(entry: dict[int, Logprob] | None) -> list[float]:
    """Return an entry's log-probabilities: the sampled token's, then the others by size, since near ones may swap."""
    values = [told.logprob for told in (entry or {}).values()]
    return [*values[:1], *sorted(values[1:])]


def is_ended_by_itself(told: CompletionOutput) -> bool:
    return told.finish_reason == "stop" and told.stop_reason is None


def is_valid(tokenizer: Tokenizer, request: Asked, told: CompletionOutput) -> bool:
    """Return whether the text of an output that ended by itself satisfies the request's constraint."""
    if request.kind is None:
        return True
    text = told.text
    if request.params.structured_outputs is not None and request.params.structured_outputs.begin_after:
        after = _behind_marker(tokenizer, request.prompt, told)
        if after is None:
            return True
        text = after
    return KINDS[request.kind][1](text)


def _behind_marker(tokenizer: Tokenizer, prompt: list[int], told: CompletionOutput) -> str | None:
    """Return the text after the token in which the marker ends; None if the marker is missing."""
    state, read = detokenizer.begin(tokenizer, prompt, SamplingParams()), ""
    for at, token in enumerate(told.token_ids):
        state, delta = detokenizer.advance(state, tokenizer, [token])
        read += delta
        if MARKER in read:
            return told.text[len(read) :] if at < len(told.token_ids) else ""
    return None
