"""Validate random outputs independently of llguidance: jsonschema, Python's re, a recognizer of grammars.

An output that ends by itself is always valid. The JSON-Schema-Test-Suite must be checked out next to the repository.
"""

import json
import random
import re

import jsonschema
import pytest

from jaxllm import embedded
from jaxllm.text.tokenizer import load_tokenizer
from tests.structured_output.draws import Drawing
from tests.support.paths import ROOT

SUITE = ROOT.parent / "shared" / "data" / "json_schema_suite"
# Python's re does not support \p{Letter}, so that jsonschema raises.
UNJUDGED = {
    "pattern with Unicode property escape requires unicode mode",
    "patternProperties with Unicode property escape",
}
NUM_SCHEMAS = 500
TEXTS = ["a", 'q"', "\\", "é", "日", "\n", "name", "</s>", "x y"]


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    tokenizer = load_tokenizer(embedded.MODEL_DIR)
    assert tokenizer.eos_token_id is not None
    return Drawing(tokenizer, tokenizer.eos_token_id)


def _suite() -> list[tuple[str, object]]:
    if not SUITE.exists():
        pytest.skip("The JSON-Schema-Test-Suite is not beside the checkout.")
    groups = [(file.stem, group) for file in sorted(SUITE.glob("*.json")) for group in json.loads(file.read_text())]
    return [(f"{stem}: {each['description']}", each["schema"]) for stem, each in groups]


def _schema(rng: random.Random, depth: int = 0) -> dict:
    """Make a schema of supported keywords; some output satisfies most of them."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf", "ref", "allOf", "types"] * (depth < 3) * 2)
    low = rng.randrange(-50, 50)
    match kind:
        case "string":
            return {"type": "string", "minLength": (least := rng.randrange(3)), "maxLength": least + rng.randrange(6)}
        case "integer":
            step = rng.choice([1, 1, 2, 7])
            return {
                "type": "integer",
                "minimum": low,
                "exclusiveMaximum": low + 2 * step + rng.randrange(99),
                "multipleOf": step,
            }
        case "number":
            return {"type": "number", "exclusiveMinimum": low / 4, "maximum": low / 4 + rng.randrange(1, 999) / 8}
        case "enum":
            return {"enum": rng.sample([*TEXTS, 1, -2.5, None, True, {"a": [1]}, []], rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice([*TEXTS, 0, {"b": None}])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice([r"^\d{2,4}$", "^[a-z]+[0-9]?$", "(foo|ba+r)", "^x.{0,3}y$"]),
            }
        case "object":
            names = rng.sample(TEXTS, rng.randrange(4))
            rest = rng.choice([False, False, True, {"type": "integer"}])
            schema = {"type": "object", "properties": {name: _schema(rng, depth + 1) for name in names}}
            return {**schema, "required": [name for name in names if rng.random() < 0.6], "additionalProperties": rest}
        case "array":
            least = rng.randrange(3)
            first = [_schema(rng, depth + 1) for _ in range(rng.randrange(3))]
            size = {"minItems": least, "maxItems": least + rng.randrange(3)}
            return {"type": "array", "items": _schema(rng, depth + 1), "prefixItems": first, **size}
        case "anyOf":
            return {"anyOf": [_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
        case "allOf":
            name, other = rng.sample(TEXTS, 2)
            parts = [{"properties": {each: _schema(rng, depth + 1)}, "required": [each]} for each in (name, other)]
            return {"type": "object", "allOf": parts}
        case "types":
            return {
                "type": rng.sample(["string", "null", "integer", "array"], 2),
                "maxLength": 4,
                "maximum": 9,
                "maxItems": 2,
            }
        case "ref":
            return {"$defs": {"d": (inner := _schema(rng, 3))}, "anyOf": [inner, {"type": "null"}]}
    return {"type": kind}


def _judge_schema(drawing: Drawing, schema: object, num_outputs: int, **asked: object) -> tuple[bool, int]:
    """Return whether a schema compiles, and how many of its outputs ended by themselves; all of them are valid."""
    grammar = drawing.compile(json=json.dumps(schema), **asked)
    if grammar is None:
        return False, 0
    judge = jsonschema.Draft202012Validator(schema)
    texts = [drawing.text(grammar, seed) for seed in range(num_outputs)]
    for text in texts:
        assert text is None or judge.is_valid(json.loads(text)), (schema, text)
    return True, sum(text is not None for text in texts)


def _judge_schemas(drawing: Drawing, first: int, num_groups: int, num_schemas: int, num_outputs: int) -> None:
    compiled = ended = 0
    for name, schema in _suite()[first : first + num_groups]:
        if not any(name.endswith(each) for each in UNJUDGED):
            one, outputs = _judge_schema(drawing, schema, num_outputs)
            compiled, ended = compiled + one, ended + outputs
    for seed in range(10**6):
        if compiled >= num_schemas:
            break
        compact = {"disable_any_whitespace": seed % 2 == 0}
        one, outputs = _judge_schema(drawing, _schema(random.Random(seed)), num_outputs, **compact)
        compiled, ended = compiled + one, ended + outputs
    assert ended > compiled * num_outputs / 2


def test_outputs_satisfy_their_schemas(drawing):
    _judge_schemas(drawing, 0, 60, 80, 4)


@pytest.mark.slow  # 80 s
def test_outputs_satisfy_all_schemas(drawing):
    _judge_schemas(drawing, 0, 10**6, NUM_SCHEMAS, 40)


def _expression(rng: random.Random, depth: int = 0) -> str:
    """Make a regular expression in Python's syntax."""
    atoms = [
        *("a", "b", "é", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", "[a-c]", "[^a-c]", r"[\w-]", r"[^\s\d]", r"\."),
        *(r"\n", r"[^\W_]", r"[^\D5]", "/", "#", '"', "(?i:k)", "(?i:[a-c])", r"(?a:\w)", r"(?a:[^\s])", "(?s:.)"),
        *(r"\x41", r"[\]\^]", r"[^\S\n]", "(?-i:k)", "(?-s:.)", "(?i:a(?-i:b)c)", "(?s:.(?-s:.))", "(?i-s:.k)"),
    ]
    kind = rng.choice(["atom", "atom", "row", "or", "repeat", "group"]) if depth < 4 else "atom"
    inner = [_expression(rng, depth + 1) for _ in range(rng.randrange(1, 4))] if kind != "atom" else []
    match kind:
        case "row":
            return "".join(inner)
        case "or":
            return f"(?:{'|'.join(inner)})"
        case "repeat":
            return f"(?:{inner[0]}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{,2}', '*?', '+?', '{1,2}?'])}"
        case "group":
            return f"({inner[0]})"
    return rng.choice(atoms)


def _judge_expressions(drawing: Drawing, numbers: range, num_outputs: int) -> None:
    ended = 0
    for number in numbers:
        rng = random.Random(number)
        regex = _expression(rng)
        regex = rng.choice(["{}", "^{}$", "{}$", r"\A(?:{})\Z", "(?m)^{}$", "(?s){}"]).format(f"(?:{regex})")
        grammar = drawing.compile(regex=regex)
        assert grammar is not None, regex
        for seed in range(num_outputs):
            text = drawing.text(grammar, seed, most=60)
            assert text is None or re.fullmatch(regex, text), (regex, text)
            ended += text is not None
    assert ended > len(numbers) * num_outputs / 2


def test_outputs_match_their_expressions(drawing):
    _judge_expressions(drawing, range(60), 8)


@pytest.mark.slow
def test_outputs_match_more_expressions(drawing):
    _judge_expressions(drawing, range(60, 360), 40)


Node = tuple  # a kind and its parts: a text, a class, the number of a rule, or other nodes


def _grammar(rng: random.Random) -> list[Node]:
    """Make rules that each refer to later ones, or to themselves between two texts."""
    count = rng.randrange(2, 5)

    def node(rule: int, depth: int) -> Node:
        kind = rng.choice(
            ["text", "class", "rule", "row", "or", "opt", "star", "plus"] if depth < 3 else ["text", "class"]
        )
        if kind == "text":
            return (kind, rng.choice(["a", "b", "if ", '"', "\\", "é", "(", "\n"]))
        if kind == "class":
            return (kind, rng.choice(["0-9", "a-c", "^a-z0-9", "x"]))
        if kind == "rule":
            if rule + 1 < count:
                return (kind, rng.randrange(rule + 1, count))
            return ("or", ("row", ("text", "("), ("rule", rule), ("text", ")")), ("text", "a"))
        if kind in ("row", "or"):
            return (kind, *(node(rule, depth + 1) for _ in range(rng.randrange(1, 4))))
        # In a row with a text, because gbnf_to_lark drops the parentheses of one quantifier around another.
        return (kind, ("row", node(rule, depth + 1), ("text", ",")))

    return [("row", node(rule, 0), ("text", "!")) for rule in range(count)]


def _written(node: Node, gbnf: bool) -> str:
    kind, *parts = node
    if kind == "text":
        return json.dumps(parts[0], ensure_ascii=False)
    if kind == "class":
        return f"[{parts[0]}]" if gbnf else f"/[{parts[0]}]/"
    if kind == "rule":
        return f"r{parts[0]}"
    inner = [_written(each, gbnf) for each in parts]
    return f"({(' | ' if kind == 'or' else ' ').join(inner)})" + {"opt": "?", "star": "*", "plus": "+"}.get(kind, "")


def _recognizes(rules: list[Node], text: str) -> bool:
    """Return whether a grammar derives a text, by the set of positions where each part can end."""
    known: dict[tuple[int, int], set[int]] = {}

    def ends(node: Node, starts: set[int]) -> set[int]:
        kind, *parts = node
        if kind == "text":
            return {start + len(parts[0]) for start in starts if text.startswith(parts[0], start)}
        if kind == "class":
            return {start + 1 for start in starts if re.fullmatch(f"[{parts[0]}]", text[start : start + 1])}
        if kind == "rule":
            for start in starts:
                if (parts[0], start) not in known:
                    known[parts[0], start] = ends(rules[parts[0]], {start})
            return set().union(*(known[parts[0], start] for start in starts))
        if kind == "or":
            return set().union(*(ends(each, starts) for each in parts))
        if kind == "row":
            for each in parts:
                starts = ends(each, starts)
            return starts
        found = ends(parts[0], starts)
        reached = found | (starts if kind != "plus" else set())
        while kind != "opt" and (found := ends(parts[0], found) - reached):
            reached |= found
        return reached

    return len(text) in ends(rules[0], {0})


def _judge_grammars(drawing: Drawing, numbers: range, num_outputs: int) -> None:
    ended = 0
    for number in numbers:
        rules, gbnf = _grammar(random.Random(number)), number % 2 == 0
        lines = [f"r{rule} {'::=' if gbnf else ':'} {_written(node, gbnf)}" for rule, node in enumerate(rules)]
        grammar = drawing.compile(grammar="\n".join(lines if gbnf else ["start: r0", *lines]))
        assert grammar is not None, lines
        for seed in range(num_outputs):
            text = drawing.text(grammar, seed, most=60)
            assert text is None or _recognizes(rules, text), (lines, text)
            ended += text is not None
    assert ended > len(numbers) * num_outputs / 3


def test_outputs_are_derived_by_their_grammars(drawing):
    _judge_grammars(drawing, range(40), 8)


@pytest.mark.slow
def test_outputs_are_derived_by_more_grammars(drawing):
    _judge_grammars(drawing, range(40, 140), 40)
