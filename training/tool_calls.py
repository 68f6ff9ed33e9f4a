"""What the adapter "tools" learns: which of the offered tools a question asks for, and what is said with its result.

Tools are offered as in OpenAI's API, calls are written as Hermes' models write them. Of cities and summands some are
kept for the evaluation (`holdout`), in every phrasing. Names, parameters and order of tools vary, and system messages
are of any words, so that names are copied from the prompt and what else a client writes does not matter.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxllm.text.chat_template import compile_template, render
from training import corpus, facts, stories, words
from training.corpus import Turn
from training.holdout import city_held_out, summands_held_out

# Without tools it writes what the model's own template writes. With tools each is one line of names and types: of a
# prompt of 512 tokens a client's descriptions would leave little, and the model would not understand them.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}
{{- tool.function.name + '(' }}
{%- for name, schema in (tool.function.parameters or {}).properties | items %}
{{- name + ': ' + (schema.type if schema.type is string else 'any') + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ')' + ('' if loop.last else '\\n') }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}
{{- '<tool_response>' + message.content + '</tool_response>' }}
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


class Task(NamedTuple):
    """What tools of one kind are called, how they are asked for, and what is said of a result.

    The first of the names, and of the parameters' names, is the usual one. `{0}` and `{1}` are the arguments.
    """

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    type: str  # of every parameter, as JSON schema calls it
    phrasings: tuple[str, ...]
    answer: str


_PLACES = (("city",), ("location",), ("place",), ("town",), ("name",))
_PAIRS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n", "m"))
TASKS: dict[str, Task] = {
    "add": Task(
        ("add", "add_numbers", "sum", "plus", "calculate_sum", "add_integers"), _PAIRS, "integer",
        (
            "What is {0} + {1}?", "{0} + {1}", "{0}+{1}", "{0} + {1} = ?", "How much is {0} plus {1}?",
            "Add {0} and {1}.", "What is {0} plus {1}?", "Calculate {0} + {1}.", "What is the sum of {0} and {1}?",
            "{0} plus {1}", "Add {0} to {1}.", "How much do {0} and {1} make?", "Please add {0} and {1}.",
            "Can you add {0} and {1}?", "Use the tool to add {0} and {1}.", "What do I get if I add {0} and {1}?",
        ),
        "{0} + {1} = {result}.",
    ),
    "weather": Task(
        ("get_weather", "weather", "get_current_weather", "fetch_weather", "weather_in", "find_weather"),
        _PLACES, "string",
        (
            "What is the weather in {0}?", "How is the weather in {0}?", "What's the weather like in {0}?",
            "Tell me the weather in {0}.", "Weather in {0}", "What is the weather in {0} today?",
            "How is the weather in {0} right now?", "Is it raining in {0}?", "Will it rain in {0} today?",
            "Do I need an umbrella in {0}?", "Can you check the weather in {0}?", "Check the weather in {0}, please.",
            "I am in {0}. How is the weather here?", "What is the weather like in {0} today?",
            "Is the sun shining in {0}?", "Use the tool to get the weather in {0}.",
        ),
        "The weather in {0} is {result}.",
    ),
    "multiply": Task(
        ("multiply", "times", "multiply_numbers", "product"), _PAIRS, "integer",
        (
            "What is {0} * {1}?", "{0} * {1}", "Multiply {0} by {1}.", "How much is {0} times {1}?",
            "What is {0} times {1}?", "Calculate {0} * {1}.", "What is the product of {0} and {1}?",
        ),
        "{0} * {1} = {result}.",
    ),
    "time": Task(
        ("get_time", "current_time", "time_in", "get_clock"), _PLACES, "string",
        (
            "What time is it in {0}?", "Tell me the time in {0}.", "What is the time in {0}?", "How late is it in {0}?",
            "Can you tell me the time in {0}?", "What does the clock say in {0}?",
        ),
        "It is {result} in {0}.",
    ),
    "age": Task(
        ("get_age", "age_of", "find_age", "lookup_age"), (("name",), ("person",), ("who",)), "string",
        ("How old is {0}?", "What is the age of {0}?", "Tell me the age of {0}.", "Do you know how old {0} is?"),
        "{0} is {result} years old.",
    ),
}  # fmt: skip
USUAL: tuple[str, ...] = ("add", "weather")  # the tasks that are promised

_MORE_CITIES = """
    Aberdeen Adelaide Antwerp Auckland Barcelona Basel Bergen Bilbao Birmingham Bologna Bombay Bordeaux Boston Brighton
    Bristol Calgary Cambridge Cardiff Casablanca Chicago Cologne Dallas Denver Detroit Dortmund Dresden Durban Edinburgh
    Florence Frankfurt Geneva Genoa Ghent Glasgow Gothenburg Granada Graz Hamburg Hanover Houston Innsbruck Istanbul
    Johannesburg Karachi Krakow Kyoto Lagos Leeds Leipzig Liverpool Lucerne Lyon Manchester Marrakesh Marseille
    Melbourne Memphis Miami Milan Mombasa Montreal Mumbai Munich Nagoya Naples Nice Nottingham Odessa Osaka Oxford
    Palermo Perth Philadelphia Phoenix Pisa Portland Porto Rotterdam Salzburg Seattle Seville Shanghai Stuttgart Sydney
    Tampere Toronto Toulouse Trondheim Turin Utrecht Valencia Vancouver Venice Verona Winnipeg York Zurich
"""
CITIES: tuple[str, ...] = (
    *sorted({country[1] for country in facts.COUNTRIES}),
    *_MORE_CITIES.split(),
    *("New York", "San Francisco", "Cape Town", "Los Angeles", "Salt Lake City", "Hong Kong", "Las Vegas", "San Diego"),
)
_CONDITIONS: tuple[str, ...] = (
    "sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear", "warm", "cold", "hot", "humid", "mild",
    "dry", "wet", "icy", "freezing", "bright",
)  # fmt: skip
_REPORTS: tuple[str, ...] = (
    "{one}", "{one}", "{one} and {other}", "{degrees} degrees and {one}", "{one}, {degrees} degrees",
    "{one} with {degrees} degrees", "{degrees}°C and {one}", "{one}, {degrees}°C", "{words}",
    "It is {one} in {city}.", "It's always {one} in {city}!", "In {city} it is {one} and {degrees} degrees.",
)  # fmt: skip
_SYSTEMS: tuple[str, ...] = (
    *words.SYSTEMS, "You are a helpful assistant. Use the tools.", "Use the tools that you have.",
    "Always call a tool when one fits.", "You are an agent. Answer with the help of tools.",
    "You are a weather assistant.", "You can do sums. Use your tools for them, and answer in one sentence.",
)  # fmt: skip


class Offer(NamedTuple):
    """A tool that a client offers for a task."""

    task: str
    name: str
    parameters: tuple[str, ...]

    def schema(self, description: str = "") -> dict[str, Any]:
        """Return the tool as OpenAI's API takes it."""
        kind = {"type": TASKS[self.task].type}
        properties = dict.fromkeys(self.parameters, kind)
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}


USUAL_OFFERS: tuple[Offer, ...] = tuple(Offer(own, TASKS[own].names[0], TASKS[own].parameters[0]) for own in USUAL)


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
    """Return a call as the model is to write it.

    >>> call_text("add", {"a": 47, "b": 38})
    '<tool_call>{"name": "add", "arguments": {"a": 47, "b": 38}}</tool_call>'
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def draw_number(rng: random.Random) -> int:
    """Draw a number of one to four digits."""
    return rng.randrange(rng.choice((100, 100, 1000, 1000, 10_000)))


def draw_summands(rng: random.Random, held_out: bool) -> tuple[int, int]:
    """Draw two numbers."""
    while True:
        a, b = draw_number(rng), draw_number(rng)
        if summands_held_out(a, b) == held_out:
            return a, b


def invented_name(rng: random.Random) -> str:
    """Return a capitalised word, made up or not, so that a name is copied and not known."""
    lot = rng.random()
    if lot < 0.4:
        own = corpus.invented_word(rng) + rng.choice(("", "", "burg", "ton", "ville", "heim", "a", "ia"))
    elif lot < 0.8:
        first, second = (rng.choice(CITIES).split()[0].lower() for _ in range(2))
        own = first[: rng.randint(2, 5)] + second[-rng.randint(2, 5) :]
    else:
        own = rng.choice(words.WORDS)
    return own.capitalize()


def draw_city(rng: random.Random, held_out: bool) -> str:
    """Draw a city, or for training as often a name that is none, of up to three words."""
    while True:
        city = rng.choice(CITIES)
        if not held_out and rng.random() < 0.55:
            city = " ".join(invented_name(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))))
            city = f"{rng.choice(('New', 'San', 'Port', 'Saint'))} {city}" if rng.random() < 0.1 else city
        if city_held_out(city) == held_out:
            return city


def draw_report(rng: random.Random, city: str) -> str:
    """Draw what a weather service says, as a few words or as a sentence."""
    one, other = rng.sample(_CONDITIONS, 2)
    drawn = " ".join(rng.choices(words.WORDS, k=rng.randint(1, 4)))
    report = rng.choice(_REPORTS).format(one=one, other=other, degrees=rng.randint(-20, 40), words=drawn, city=city)
    return facts.capitalised(report) if rng.random() < 0.15 else report


def answer_to(task: Task, arguments: tuple[Any, ...], result: str) -> str:
    """Return what is said with a result; one that is a sentence is the answer."""
    return result if result[-1] in ".!" else task.answer.format(*arguments, result=result)


def draw_turn(rng: random.Random, offer: Offer, held_out: bool = False) -> ToolTurn:
    """Draw a question for a tool. In training one number in four that it returns is any number: it is to be copied."""
    task = TASKS[offer.task]
    arguments: tuple[Any, ...]
    if task.type == "integer":
        a, b = arguments = draw_summands(rng, held_out)
        value = a + b if offer.task == "add" else a * b
        result = str(value if held_out or rng.random() < 0.75 else rng.randrange(10 ** rng.randint(1, 6)))
    elif offer.task == "age":
        arguments = (rng.choice((rng.choice(words.PERSONS), invented_name(rng))),)
        result = str(rng.randint(1, 99))
    else:
        arguments = (draw_city(rng, held_out),)
        clock = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
        result = clock if offer.task == "time" else draw_report(rng, arguments[0])
    question = rng.choice(task.phrasings).format(*arguments)
    named = dict(zip(offer.parameters, arguments, strict=True))
    return ToolTurn(question, offer.name, named, result, answer_to(task, arguments, result))


def draw_offers(rng: random.Random) -> list[Offer]:
    """Draw one to three tools: in half of the cases the two usual ones, in either order."""
    lot = rng.random()
    if lot < 0.5:
        chosen = list(USUAL)
    elif lot < 0.65:
        chosen = [rng.choice(USUAL)]
    else:
        chosen = rng.sample(list(TASKS), rng.randint(1, 3))
    rng.shuffle(chosen)
    offers = []
    for own in chosen:
        task, is_usual = TASKS[own], rng.random() < 0.6
        name = task.names[0] if is_usual else rng.choice(task.names)
        parameters = task.parameters[0] if is_usual else rng.choice(task.parameters)
        offers.append(Offer(own, name, parameters))
    return offers


def draw_plain_turn(rng: random.Random, offers: list[Offer]) -> Turn:
    """Draw a question that needs none of the tools: the model answers it as it does without them."""
    lot, tasks = rng.random(), {offer.task for offer in offers}
    if lot < 0.6:
        return corpus.fact_turn(rng)
    if lot < 0.75:
        return corpus.talk_turn(rng)
    if lot < 0.85 or "add" not in tasks:
        while True:
            turn = corpus.sum_turn(rng)
            if " + " not in turn.answer or "add" not in tasks:
                return turn
    if "weather" not in tasks:
        return Turn(draw_turn(rng, USUAL_OFFERS[1]).question, words.UNKNOWN_ANSWER)
    return corpus.unknown_turn(rng)


def draw_system(rng: random.Random) -> str:
    """Draw a system message: a sensible one, or any words."""
    lot = rng.random()
    if lot < 0.5:
        return rng.choice(_SYSTEMS)
    if lot < 0.75:
        return facts.capitalised(" ".join(rng.choices(words.WORDS, k=rng.randint(2, 30)))) + "."
    return " ".join(stories.story(rng).split(". ")[: rng.randint(1, 4)]) + "."


def conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw a chat of one to three questions, and the tools that are offered in it."""
    offers = draw_offers(rng)
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append({"role": rng.choice(("system", "system", "system", "developer")), "content": draw_system(rng)})
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        if rng.random() < 0.8:
            turn = draw_turn(rng, rng.choice(offers))
            asked, *rest = turn.messages()
        else:
            plain = draw_plain_turn(rng, offers)
            asked = {"role": "user", "content": plain.question}
            rest = [{"role": "assistant", "content": plain.answer}]
        messages += [asked | {"content": corpus.typed_casually(rng, asked["content"])}, *rest]
    return messages, [offer.schema() for offer in offers]


def documents(rng: random.Random, longest: int) -> Iterator[str]:
    """Yield chats without end: three in four with tools, the others the model's own of at most `longest` turns."""
    template = compile_template(CHAT_TEMPLATE)
    own = corpus.documents(rng, longest, sums_share=0.0)
    while True:
        if rng.random() < 0.25:
            yield next(own)
            continue
        messages, tools = conversation(rng)
        text = render(
            template, messages, add_generation_prompt=False, continue_final_message=False, tools=tools, variables={}
        )
        yield text + corpus.END_OF_TEXT
