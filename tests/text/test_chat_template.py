"""Chat templates against transformers' rendering, and refused templates and conversations."""

from __future__ import annotations

import json
import time
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
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "processor"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(UserError, match="chat_template must be a text"):
        load_tokenizer(tmp_path)


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
        ("{{ ''.__class__.__mro__ }}", {}, "access to attribute '__class__' of"),
        ("{{ self.__init__.x }}", {}, "rejects this conversation: access to attribute '__init__' of"),
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


def test_a_large_conversation_is_not_cut() -> None:
    """A conversation of 4 MB in 2,000 messages, each copied several times; and the system prompts collected in one."""
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
        == {"text": ["[a\nb]", "[a]", "[x\ny]"], "parts": ["a|b|", "a|", "x|y|"], "both": ["a|b|", "[a]", "x|y|"]}[kind]
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
    assert str(caught.value) == (f"messages[1].content[1] is a part of type {kind!r}, which this model does not read.")
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


def test_a_template_without_end_is_cut() -> None:
    template = compile_template("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}")
    with pytest.raises(UserError, match="the rendered prompt has more than 33554432 characters"):
        render(
            template,
            CONVERSATION[:1],
            add_generation_prompt=True,
            continue_final_message=False,
            tools=None,
            variables={},
        )
