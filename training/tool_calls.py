"""The training text of the adapter "tools": choosing one of the offered tools, and answering with its result.

Tools are offered like in OpenAI's API, and calls have the format of Hermes models. Pairs of summands, and some
phrasings for each city, are held out for the evaluation (`holdout`). System messages vary, some of random words, so
that the model learns to ignore a client's other text.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxllm.text.chat_template import compile_template, render
from training import corpus, facts, words
from training.corpus import Turn
from training.holdout import asking_held_out, summands_held_out

# Without tools, the output of the model's template. With tools, one line of names and types for each: clients'
# descriptions would take most of a prompt of 512 tokens, and the model would not understand them. The space before a
# result gives it the same tokens as in the answer.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}
{{- tool.function.name + '(' }}
{%- for name, schema in ((tool.function.parameters or {}).properties or {}) | items %}
{{- name + ': ' + (schema.type if schema.type is string else 'any') + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ')' + ('' if loop.last else '\\n') }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}
{{- '<tool_response> ' + message.content + ' </tool_response>' }}
{%- elif message.tool_calls %}
{{- message.content or '' }}
{%- for call in message.tool_calls %}
{%- set arguments = call.function.arguments %}
{{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


class Tool(NamedTuple):
    """A tool: its parameters, all of one JSON type, the phrasings of questions for it, and of answers with its result.

    In a phrasing `{0}` and `{1}` are the arguments.
    """

    name: str
    parameters: tuple[str, ...]
    type: str
    phrasings: tuple[str, ...]
    answer: str

    def schema(self, description: str = "") -> dict[str, Any]:
        """Return the tool in the format of OpenAI's API."""
        properties = {name: {"type": self.type} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}


ADD = Tool(
    "add", ("a", "b"), "integer",
    (
        "What is {0} + {1}?", "{0} + {1}", "{0}+{1}", "{0} + {1} = ?", "How much is {0} plus {1}?",
        "Add {0} and {1}.", "What is {0} plus {1}?", "Calculate {0} + {1}.", "What is the sum of {0} and {1}?",
        "{0} plus {1}", "Add {0} to {1}.", "How much do {0} and {1} make?", "Please add {0} and {1}.",
        "Can you add {0} and {1}?", "Use the tool to add {0} and {1}.",
    ),
    "The sum is {result}.",
)  # fmt: skip
WEATHER = Tool(
    "get_weather", ("city",), "string",
    (
        "What is the weather in {0}?", "How is the weather in {0}?", "What's the weather like in {0}?",
        "Tell me the weather in {0}.", "Weather in {0}", "What is the weather in {0} today?",
        "How is the weather in {0} right now?", "Is it raining in {0}?", "Will it rain in {0} today?",
        "Do I need an umbrella in {0}?", "Can you check the weather in {0}?", "Check the weather in {0}, please.",
        "What is the weather like in {0} today?", "Is the sun shining in {0}?",
        "Use the tool to get the weather in {0}.",
    ),
    "The weather is {result}.",
)  # fmt: skip
TOOLS: tuple[Tool, ...] = (ADD, WEATHER)

CITIES: tuple[str, ...] = tuple(sorted({country[1] for country in facts.COUNTRIES}))
_CONDITIONS: tuple[str, ...] = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "warm", "cold", "hot")
# Conditions that the model can write. The others contain tokens that are in no answer of its training; in its
# embedding, which an adapter does not change, such tokens have 30 others at a cosine of 1.00: " rainy" is " razer".
WRITTEN_CONDITIONS: tuple[str, ...] = tuple(own for own in _CONDITIONS if own not in ("rainy", "foggy", "clear"))
_REPORTS: tuple[str, ...] = (
    "{one}", "{one}", "{one} and {other}", "{degrees} degrees and {one}", "{one}, {degrees} degrees",
    "{one} and {degrees} degrees", "{words}",
)  # fmt: skip
_SYSTEMS: tuple[str, ...] = (
    *words.SYSTEMS, "You are a helpful assistant. Use the tools.", "Use the tools that you have.",
    "Always call a tool when one fits.", "You are an agent. Answer with the help of tools.",
    "You are a weather assistant.", "You can do sums. Use your tools for them, and answer in one sentence.",
)  # fmt: skip


class ToolTurn(NamedTuple):
    """A question, the one right call, a result of it, and the one right answer."""

    question: str
    name: str
    arguments: dict[str, Any]
    result: str
    answer: str

    def messages(self) -> list[dict[str, Any]]:
        """Return the question, the call, its result and the answer as messages."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": self.result},
            {"role": "assistant", "content": self.answer},
        ]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in the format that the model must write.

    >>> call_text("add", {"a": 47, "b": 38})
    '<tool_call>{"name": "add", "arguments": {"a": 47, "b": 38}}</tool_call>'
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def is_held_out(tool: Tool, phrasing: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a question is held out for the evaluation."""
    if tool is ADD:
        return summands_held_out(*arguments)
    return asking_held_out(phrasing.format(*arguments))


def draw_number(rng: random.Random) -> int:
    """Draw a number of up to three digits."""
    return rng.randrange(rng.choice((100, 1000)))


def draw_report(rng: random.Random, only_written: bool = False) -> str:
    """Draw a weather report: any one, or one that the model can write."""
    one, other = rng.sample(WRITTEN_CONDITIONS if only_written else _CONDITIONS, 2)
    drawn = " ".join(rng.choices(words.WORDS, k=rng.randint(1, 3)))
    report = rng.choice(_REPORTS[:-1] if only_written else _REPORTS)
    return report.format(one=one, other=other, degrees=rng.randrange(40), words=drawn)


def draw_turn(rng: random.Random, tool: Tool) -> ToolTurn:
    """Draw a question for a tool, for training. One sum in four has a random result, so that results are copied."""
    while True:
        phrasing, arguments = rng.choice(tool.phrasings), (rng.choice(CITIES),)
        result = draw_report(rng)
        if tool is ADD:
            arguments = (draw_number(rng), draw_number(rng))
            result = str(sum(arguments) if rng.random() < 0.75 else rng.randrange(2000))
        if not is_held_out(tool, phrasing, arguments):
            return make_turn(tool, phrasing, arguments, result)


def draw_held_out(rng: random.Random, tool: Tool) -> tuple[str, tuple[Any, ...]]:
    """Draw a held-out phrasing and arguments."""
    while True:
        phrasing = rng.choice(tool.phrasings)
        arguments = (rng.choice(CITIES),) if tool is WEATHER else (draw_number(rng), draw_number(rng))
        if is_held_out(tool, phrasing, arguments):
            return phrasing, arguments


def make_turn(tool: Tool, phrasing: str, arguments: tuple[Any, ...], result: str) -> ToolTurn:
    """Return a question with its call, and the answer to a result."""
    named = dict(zip(tool.parameters, arguments, strict=True))
    return ToolTurn(phrasing.format(*arguments), tool.name, named, result, tool.answer.format(result=result))


def draw_tool(rng: random.Random, tools: list[Tool]) -> Tool:
    """Draw a tool: the weather twice as often as sums, because cities are learnt more slowly than digits."""
    return rng.choices(tools, [2 if tool is WEATHER else 1 for tool in tools])[0]


def draw_plain_turn(rng: random.Random, tools: list[Tool]) -> Turn:
    """Draw a question that needs none of the tools, with the model's usual answer."""
    lot = rng.random()
    if lot < 0.7:
        return corpus.fact_turn(rng)
    if lot < 0.85:
        return corpus.talk_turn(rng)
    while True:
        turn = corpus.sum_turn(rng)
        if " + " not in turn.answer or ADD not in tools:
            return turn


def draw_system(rng: random.Random) -> str:
    """Draw a system message: a sensible one, or random words."""
    if rng.random() < 0.7:
        return rng.choice(_SYSTEMS)
    return facts.capitalised(" ".join(rng.choices(words.WORDS, k=rng.randint(2, 20)))) + "."


def conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw a chat of one to three questions, and its tools: both, in either order, or one."""
    tools = rng.sample(TOOLS, rng.choice((1, 2, 2, 2, 2)))
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(("system", "system", "developer")), "content": draw_system(rng)})
    for _ in range(rng.choice((1, 2, 2, 2, 3, 3))):
        if rng.random() < 0.85:
            asked, *rest = draw_turn(rng, draw_tool(rng, tools)).messages()
        else:
            plain = draw_plain_turn(rng, tools)
            asked = {"role": "user", "content": plain.question}
            rest = [{"role": "assistant", "content": plain.answer}]
        messages += [asked | {"content": corpus.typed_casually(rng, asked["content"])}, *rest]
    return messages, [tool.schema() for tool in tools]


def documents(rng: random.Random, longest: int) -> Iterator[str]:
    """Yield an endless stream of chats: six in seven with tools, the others the model's, of at most `longest` turns."""
    template = compile_template(CHAT_TEMPLATE)
    while True:
        if rng.random() < 1 / 7:
            yield corpus.render_chat(corpus.conversation(rng, longest)) + corpus.END_OF_TEXT
            continue
        messages, tools = conversation(rng)
        text = render(
            template, messages, add_generation_prompt=False, continue_final_message=False, tools=tools, variables={}
        )
        yield text + corpus.END_OF_TEXT
