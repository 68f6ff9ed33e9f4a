"""Chat templates against transformers' own rendering, and what a template or a conversation may not do."""

from __future__ import annotations

import json
import time
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.text.chat_template import compile_template, render
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer

TURNS = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' and loop.first %}{{ raise_exception('a tool\\ncannot begin') }}{% endif %}
    {{- '<' + message['role'] + '>' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
TOOLS = """{%- set seen = namespace(system=false) %}
{% for message in messages if message.role != 'skip' %}
  {% if message.content is not defined %}{% continue %}{% endif %}
  {% if message.role == 'stop' %}{% break %}{% endif %}
  {% if message.role == 'system' %}{% set seen.system = true %}{% endif %}
  {% generation %}{{ message.role | upper }}: {{ message.content | trim }}{% endgeneration %}

{% endfor %}
{{ seen.system }} {{ tools | tojson(indent=2) if tools else 'no tools' }} {{ messages[0] | tojson }}
{{ documents is none }} {{ pad_token is defined }} {{ thinking | default('off') }} {{ strftime_now('%Y') }}
{{ dict(a=1).items() | list }} {{ range(3) | list }} {{ '<é&>' | tojson }}
"""
TRIMMED = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
PARTS = "{% for message in messages %}{% for part in message.content %}{{ part.text }}|{% endfor %}{% endfor %}"
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief.  "},
    {"role": "user", "content": "Wie heißt du? <b>\n", "name": None},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]},
    {"role": "user", "content": "  And now  "},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "<é>", "parameters": {"x": [1, True]}},
}


def _folder(folder: Path, template: object = None, **files: str) -> Path:
    backend = Backend(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


def _both(folder: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    return load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (TURNS, {"messages": CONVERSATION[:2]}),
        (TURNS, {"messages": CONVERSATION[:2], "add_generation_prompt": False}),
        (TURNS, {"messages": CONVERSATION[:2], "bos_token": "<other>"}),
        (TOOLS, {"messages": CONVERSATION}),
        (TOOLS, {"messages": CONVERSATION[1:], "tools": [TOOL], "thinking": "on"}),
        (TOOLS, {"messages": [*CONVERSATION, {"role": "stop", "content": ""}, CONVERSATION[0]], "tools": []}),
        (TRIMMED, {"messages": [CONVERSATION[0], CONVERSATION[3]]}),
        (
            PARTS,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}
                ]
            },
        ),
    ],
)
def test_same_text_as_transformers(template: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = _both(_folder(tmp_path, template))
    arguments = {"add_generation_prompt": True, **arguments}
    messages = arguments.pop("messages")
    before = json.dumps(messages)
    expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
    assert ours.apply_chat_template(messages, **arguments) == expected
    assert json.dumps(messages) == before
    assert str(datetime.now().year) in expected or template != TOOLS


@pytest.mark.parametrize(
    ("template", "content"),
    [
        *((template, content) for template in (TURNS, TRIMMED) for content in ("I am", "I am ", " \n")),
        (PARTS, [{"type": "text", "text": "I"}, {"type": "text", "text": "am "}]),
    ],
)
def test_continued_message_is_left_open(template: str, content: Any, tmp_path: Path) -> None:
    ours, theirs = _both(_folder(tmp_path, template))
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours.apply_chat_template(messages, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    last = content if isinstance(content, str) else content[-1]["text"]
    assert text.endswith(last.strip() if template == TRIMMED else last)


def test_template_is_chosen_by_file_then_config_and_by_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    messages = [{"role": "user", "content": "x"}]
    ours, theirs = _both(_folder(tmp_path, named))
    for arguments in ({}, {"tools": [TOOL]}, {"chat_template": "rag"}, {"chat_template": "{{ messages[0].content }}!"}):
        text = ours.apply_chat_template(messages, **arguments)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    ours, theirs = _both(
        _folder(tmp_path, named, chat_template_jinja="file", additional_chat_templates__rag_jinja="more")
    )
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False) == "file"
    assert ours.apply_chat_template(messages, chat_template="rag") == "more"
    assert ours.apply_chat_template(messages, tools=[TOOL]) == "file"


@pytest.mark.parametrize(
    ("template", "arguments", "message"),
    [
        (None, {}, "has no chat template; use generate()."),
        (
            [{"name": "a", "template": ""}, {"name": "b", "template": ""}],
            {},
            "no default chat template; choose one of a, b.",
        ),
        (TURNS, {"messages": [{"role": "tool", "content": ""}]}, "rejects this conversation: a tool cannot begin"),
        (TURNS, {"messages": [{"role": "user", "content": 3}]}, "rejects this conversation: a value in it is"),
        (TURNS, {"messages": []}, "messages must be a list of at least one message"),
        (TURNS, {"messages": "hello"}, "messages must be a list of at least one message"),
        (TURNS, {"messages": ["hello"]}, "messages[0] must be an object with a role"),
        (TURNS, {"messages": [CONVERSATION[0], {"content": "x"}]}, "messages[1] must be an object with a role"),
        (TURNS, {"messages": [{"role": "user", "content": Path("x")}]}, "text, numbers, lists and objects only, got"),
        (TURNS, {"tools": [len]}, "tools may hold text, numbers, lists and objects only, got builtin_function"),
        (TURNS, {"continue_final_message": True}, "exclude each other"),
        ("{{", {}, "is not valid in line 1"),
        ("a\n{% for %}", {}, "is not valid in line 2"),
        (
            "{{ ''.__class__.__mro__ }}",
            {},
            "rejects this conversation: access to attribute '__class__' is not allowed.",
        ),
        ("{{ self.__init__.x }}", {}, "rejects this conversation: access to attribute '__init__' is not allowed."),
        ("{{ messages[0].nothing.at }}", {}, "rejects this conversation: there is no 'nothing'"),
        ("{{ nothing.at }}", {}, "rejects this conversation: there is no 'nothing'"),
        ("{{ messages.append(1) }}", {}, "rejects this conversation: access to attribute 'append'"),
        ("{{ range(10**9) | list }}", {}, "rejects this conversation: Range too big"),
    ],
)
def test_refusals_are_one_line(template: object, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_folder(tmp_path, template))
    with pytest.raises(UserError) as caught:
        tokenizer.apply_chat_template(arguments.pop("messages", CONVERSATION[:2]), **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


GROWING = "{% set all = namespace(x='ab', l=[1]) %}{% for i in range(99) %}"
NESTS = "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}" + (
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
TUPLES = NESTS.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("[ns.b, ns.b]", "(ns.b, ns.b)").replace("[]", "()")
AGAIN = "{% for i in range(9999) %}"
LONG = "{% set t = 'a ' * 4000000 %}"
HOSTILE = {
    "equal nests": NESTS + "{{ ns.a == ns.b }}",
    "chained nests": NESTS + "{{ 1 < 2 < 3 and ns.a == ns.b == ns.a }}",
    "unequal nests": NESTS + "{{ ns.a != ns.b }}",
    "ordered nests": NESTS + "{{ ns.a < ns.b }}",
    "nests in": NESTS + "{{ ns.a in [ns.b] }}",
    "nests not in": NESTS + "{{ ns.a not in [ns.b] }}",
    "nests in generator": NESTS + "{{ ns.a in [none] | map('default', ns.b, true) }}",
    "nests is eq": NESTS + "{{ ns.a is eq ns.b }}",
    "nests is in": NESTS + "{{ ns.a is in [ns.b] }}",
    "nests is lower": NESTS + "{{ ns.a is lower }}",
    "nests count": NESTS + "{{ [ns.b].count(ns.a) }}",
    "nests index": NESTS + "{{ [ns.b].index(ns.a) }}",
    "nests selectattr": NESTS + "{{ [{'x': ns.b}] | selectattr('x', 'eq', ns.a) | list }}",
    "nests select": NESTS + "{{ [ns.b] | select('==', ns.a) | list }}",
    "nests changed": NESTS + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "nests sorted": NESTS + "{{ [ns.a, ns.b] | sort }}",
    "nests sorted by what hides them": NESTS + "{{ [namespace(x=ns.a), namespace(x=ns.b)] | sort(attribute='x') }}",
    "nests generated and sorted": NESTS + "{{ [ns.a, ns.b] | map('list') | sort }}",
    "nests grouped": NESTS + "{{ [{'x': ns.a}, {'x': ns.b}] | groupby('x') }}",
    "nests min": NESTS + "{{ [ns.a, ns.b] | min }}",
    "nests dictsort": NESTS + "{{ {'a': ns.a, 'b': ns.b} | dictsort(by='value') }}",
    "nests unique": TUPLES + "{{ [ns.a, ns.b] | unique | list }}",
    "nests as key": TUPLES + "{{ {ns.a: 1} }}",
    "nests as index": TUPLES + "{{ {}[ns.a] }}",
    "nests got": TUPLES + "{{ {}.get(ns.a) }}",
    "nests from keys": TUPLES + "{{ {}.fromkeys([ns.a]) }}",
    "nests as pairs": TUPLES + "{{ dict([(ns.a, 1)]) }}",
    "nests of views": TUPLES + "{{ {'a': ns.a}.items() - {'a': ns.b}.items() }}",
    "nests equal by views": TUPLES + "{{ {'a': ns.a}.items() == {'a': ns.b}.items() }}",
    "nests of disjoint views": TUPLES + "{{ {'a': ns.a}.items().isdisjoint([1]) }}",
    "nests as an attribute": TUPLES + "{{ [{}] | map(attribute=ns.a) | list }}",
    "written view": NESTS + "{{ {'a': ns.a}.values() }}",
    "written namespace": NESTS + "{{ ns }}",
    "namespace as text": NESTS + "{{ ns ~ 'x' }}",
    "flat lists": "{% set a = range(99999) | list %}{% set b = range(99999) | list %}"
    + AGAIN
    + "{{ a == b }}{% endfor %}",
    "texts": "{% set t = 'a' * 9999999 %}{% set u = 'a' * 9999999 %}"
    + AGAIN
    + "{{ t == u }}{{ 'ab' in t }}{% endfor %}",
    "equal texts in a list": "{% set t = 'a' * 999999 %}{{ ([t] * 99999).count('a' * 999999) }}",
    "wordwrap": LONG + "{{ t | wordwrap(1) | length }}",
    "title": LONG + "{{ t | title | length }}",
    "urlize": LONG + "{{ t | urlize | length }}",
    "striptags": "{{ ('<!---->' * 1000000) | striptags | length }}",
    "groups": "{% set l = [{'a': 1}] * 40000 %}" + AGAIN + "{{ l | groupby('a') | length }}{% endfor %}",
    "sorts": "{% set l = range(99999) | list %}" + AGAIN + "{{ l | sort(reverse=true) | length }}{% endfor %}",
    "pprint": "{{ (range(99999) | list) | pprint | length }}",
    "rfind": "{{ ('a' * 4000000).rfind('ab' + 'a' * 2000000) }}",
    "rsplit": "{{ ('a' * 4000000).rsplit('ab' + 'a' * 2000000) }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 3000000 ~ 'a') }}",
    "trim": "{{ ('a' * 4000000) | trim('b' * 3000000 ~ 'a') }}",
    "bytes": "{{ ('x'.encode() * 10**9) | length }}",
    "integer as bytes": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "many fields": "{{ ('{0}' * 9999).format('x' * 99999) | length }}",
    "many named fields": "{{ ('%(a)s' * 9999) | format(a='x' * 99999) | length }}",
    "many indented lines": "{{ ('\n' * 99999) | indent(9999, blank=true) | length }}",
    "tabs": "{{ ('\t' * 99999).expandtabs(9999) | length }}",
    "wide JSON": NESTS.replace("60", "9").replace("[ns.a, ns.a]", "[ns.a]")
    + "{{ [[1] * 9999] | tojson(indent=9999) }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops of text": "{% for a in 'x' * 99999 %}{% for b in 'x' * 99999 %}{{ '' if a == b }}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "written list": "{% set l = [messages[0].content * 999] %}{{ l * 99999 }}",
    "concat": GROWING + "{% set all.x = all.x ~ all.x %}{% endfor %}",
    "plus": GROWING + "{% set all.x = all.x + all.x %}{% endfor %}",
    "times": "{{ 'x' * 10**9 }}",
    "list plus": GROWING + "{% set all.l = all.l + all.l %}{% endfor %}",
    "list times": "{{ ([1] * 10**9) | length }}",
    "nested lists": GROWING + "{% set all.l = [all.l, all.l] %}{% endfor %}{{ all.l }}",
    "nested lists as JSON": GROWING + "{% set all.l = [all.l, all.l] %}{% endfor %}{{ all.l | tojson }}",
    "nested lists joined": GROWING + "{% set all.l = [all.l, all.l] %}{% endfor %}{{ all.l | join }}",
    "nested lists formatted": GROWING + "{% set all.l = [all.l, all.l] %}{% endfor %}{{ '%s' % all.l }}",
    "block": GROWING + "{% set x %}{{ all.x }}{{ all.x }}{% endset %}{% set all.x = x %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "recursive loop": "{% set l = [1, 2] %}{% for x in l recursive %}{{ loop(l) }}{% endfor %}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) | length }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) | length }}",
    "join": "{{ ''.join(['x' * 99999] * 99999) | length }}",
    "join filter": "{{ ['x' * 99999] * 99999 | join | length }}",
    "join generator": "{{ range(99999) | map('default', 'y') | map('center', 9999) | join | length }}",
    "separator": "{{ ('x' * 99999).join('y' * 99999) | length }}",
    "center": "{{ 'x' | center(10**9) | length }}",
    "folded center": "{{ 'x' | center(1000000000) | length }}",
    "ljust": "{{ 'x'.ljust(1000000000) | length }}",
    "indent": "{{ 'x\n' | indent(1000000000) | length }}",
    "percent": "{{ ('%1000000000d' % 1) | length }}",
    "percent star": "{{ ('%*d' % (1000000000, 1)) | length }}",
    "format": "{{ '{:1000000000}'.format(1) | length }}",
    "format argument": "{{ '{:{}}'.format(1, 1000000000) | length }}",
    "format filter": "{{ '%1000000000d' | format(1) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sum": "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
    "slices": "{{ 'x' | slice(10**9) | list | length }}",
    "source": "{{ 1 }}" * 50_000,
    "deep source": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep expression": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
}


# Weighed where another of them is, each half a second: left to `make test-slow`.
ALIKE = {
    *("chained nests", "unequal nests", "nests in", "nests not in", "nests is eq", "nests is lower", "nests index"),
    *("nests selectattr", "nests sorted by what hides them", "nests generated and sorted", "nests grouped"),
    *("nests min", "nests dictsort", "nests as index", "nests got", "nests from keys", "nests as pairs"),
    *("nests equal by views", "nests of disjoint views", "nests as an attribute", "written namespace"),
}


# By default these are cut, in CI all others that are not alike.
QUICK = {
    *("plus", "times", "nested lists", "nested lists as JSON", "block", "macro", "recursive loop", "join filter"),
    *("center", "percent", "format argument", "squares", "source", "deep source", "deep expression"),
    *("equal nests", "nests in generator", "nests sorted", "nests as key"),
}
CUT = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow if name in ALIKE else pytest.mark.ci])
    for name in HOSTILE
]


def refusal_of(source: str) -> str:
    """Return in which words a hostile template is refused."""
    with pytest.raises(UserError, match=r"^The chat template ") as caught:
        render(
            compile_template(source),
            [{"role": "user", "content": "Be brief. " * 100}],
            add_generation_prompt=True,
            continue_final_message=False,
            tools=None,
            variables={},
        )
    return str(caught.value)


@pytest.mark.parametrize("name", CUT)
def test_a_hostile_template_is_cut(name: str) -> None:
    started = time.thread_time()
    told = refusal_of(HOSTILE[name])
    assert time.thread_time() - started < 2.0
    assert "\n" not in told and len(told) < 300


@pytest.mark.parametrize("name", CUT)
def test_a_hostile_template_takes_little_memory(name: str) -> None:
    """By itself: to follow every allocation takes as long again."""
    tracemalloc.start()
    try:
        refusal_of(HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 28


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 1 == 1 != 2 }} {{ 2 <= 2 >= 3 }}", "True False True False"),
        ("{{ 'a' in 'ab' }} {{ 'a' not in ['b'] }} {{ 'b' in {'b': 1} }} {{ 1 in nothing }}", "True True True False"),
        ("{{ messages[0] == messages[-1] }} {{ messages.index(messages[1]) }}", "False 1"),
        ("{{ messages[1] in messages }}", "True"),
        ("{{ messages[0].content == [] }} {{ 2 in messages | map('length') }}", "False True"),
        ("{{ {messages[0].role: 1}[messages[0]['role']] }} {{ {(1, 2): 3}[(1, 2)] }}", "1 3"),
        ("{{ messages | map(attribute='role') | unique | sort | join(',') }}", "assistant,user"),
        ("{{ messages | groupby('role') | map('first') | list }}", "['assistant', 'user']"),
        ("{{ 5 - 3 }} {{ [1, 2] + [3] }} {{ 'ab'.rsplit('b') }} {{ '%s-%s' % ('a', 1) }}", "2 [1, 2, 3] ['a', ''] a-1"),
        ("{{ 2 is gt 1 }} {{ 2 is in [1, 2] }} {{ 'A' is upper }} {{ nothing == '' }}", "True True True False"),
    ],
)  # fmt: skip
def test_what_is_weighed_is_the_same(source: str, text: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    told = render(
        compile_template(source),
        messages,
        add_generation_prompt=True,
        continue_final_message=False,
        tools=None,
        variables={},
    )
    assert told == text


def test_a_large_conversation_is_not_cut() -> None:
    """Of 4 MB in 2,000 messages, each copied several times on the way; and the system prompts collected in one."""
    template = compile_template(
        "{% set all = namespace(system='') %}{% for message in messages %}{% if message.role == 'system' %}"
        "{% set all.system = all.system + '\n' + message.content %}{% endif %}{% endfor %}{{ all.system }}"
        "{% for message in messages %}{% set content = message.content | trim %}"
        "{% set parts = content.split('</think>') %}"
        "{{ '<' + message.role + '>' + (parts | last).lstrip() ~ '</' ~ message.role ~ '>' }}{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}"
    )
    messages = [
        {"role": "user" if number % 100 else "system", "content": f" {'word ' * 400}{number}"} for number in range(2000)
    ]
    started = time.thread_time()
    text = render(
        template, messages, add_generation_prompt=True, continue_final_message=False, tools=None, variables={}
    )
    assert len(text) > 4_000_000 and text.endswith("user,user")
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (TRIMMED, "text"),
        (PARTS, "parts"),
        ("{% for m in messages %}{% set content = m['content'] | list %}{% for p in content %}{{ p.text }}|{% endfor %}"
         "{% endfor %}", "parts"),
        ("{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}{% for p in m['content'] %}"
         "{{ p.text }}|{% endfor %}{% endif %}{% endfor %}", "both"),
    ],
)  # fmt: skip
def test_content_comes_as_the_template_takes_it(template: str, kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_folder(tmp_path, template))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": content}]) for content in (parts, "a", ["x", "y"])
    ]
    assert (
        texts
        == {
            "text": ["[a\nb]", "[a]", "[x\ny]"],
            "parts": ["a|b|", "a|", "x|y|"],
            "both": ["a|b|", "[a]", "x|y|"],
        }[kind]
    )


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url"),
        ({"type": 7}, 7),
        *((3, "number"), (0.5, "number"), (None, "null"), (True, "boolean"), ([], "array"), ((), "array")),
    ],
)
def test_parts_that_are_no_text_are_refused_by_their_type(part: Any, kind: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_folder(tmp_path, TRIMMED))
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.apply_chat_template([CONVERSATION[0], {"role": "user", "content": ["a", part]}])
    assert str(caught.value) == (f"messages[1].content[1] is a part of type {kind!r}; jaxllm takes parts of text only.")
    with pytest.raises(UserError, match=r"messages\[0\]\.content\[0\] must have a text"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": None}]}])


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        ("{{ messages[0].role }}", "x", "leaves out the final message"),
        (TRIMMED, None, "needs a final message with text"),
        (PARTS, [], "needs a final message with text"),
    ],
)
def test_message_that_cannot_be_continued(template: str, content: Any, message: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_folder(tmp_path, template))
    with pytest.raises(UserError, match=message):
        tokenizer.apply_chat_template(
            [{"role": "assistant", "content": content}], add_generation_prompt=False, continue_final_message=True
        )


def test_a_template_of_too_many_expressions_is_refused_before_it_is_compiled() -> None:
    """180,000 characters of them took five seconds."""
    with pytest.raises(UserError, match="more than 16384 expressions"):
        compile_template("{{ a.b }}\n" * 15_000)
    compile_template("{{ a.b }}\n" * 500)
