"""Small chat templates, each in the shape of a published family's: the same inputs, the same failures.

The texts of the families' own templates are their makers'; `test_template_shapes.py` reads those from a folder.
"""

# ruff: noqa: E501 - templates
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A template and the form in which it takes conversations; fields are those of `conversations.Form`."""

    source: str
    joined: str = "user system assistant tool caller"  # roles that take no parts
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    with_tools: bool = True
    thought: str = ""  # the name of it that is read


def _turns(*branches: str, head: str = "", tail: str = "{% if add_generation_prompt %}<assistant>{% endif %}") -> str:
    return head + "{% for message in messages %}" + "".join(branches) + "{% endfor %}" + tail


_PLAIN = "{% if message.role in ['system', 'user'] %}{{ '<' + message.role + '>' + message.content }}{% endif %}"
_RESULT = "{% if message.role == 'tool' %}{{ '<tool>' + message.content }}{% endif %}"
_ANSWER = (
    "{% if message.role == 'assistant' and not message.tool_calls %}{{ '<assistant>' + message.content }}{% endif %}"
)
_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_TEXT_OF = (
    "{% macro text_of(content) %}{% if content is string %}{{ content }}{% elif content is none %}"
    "{% elif content is iterable and content is not mapping %}{% for part in content %}{{ part.text }}{% endfor %}"
    "{% endif %}{% endmacro %}"
)
_JSON_CALLS = (
    "{% if message.tool_calls %}<assistant>{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{% set call = call.function %}"
    """<call>{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}{% endfor %}{% endif %}"""
)
_WALK = "{% for key, value in call.function.arguments | items %}<{{ key }}>{{ value | tojson }}{% endfor %}"
_WALKED_CALLS = (
    "{% if message.tool_calls %}<assistant>{% for call in message.tool_calls %}<call>{{ call.function.name }}"
    + _WALK
    + "{% endfor %}{% endif %}"
)
_ADDED_CALL = "'<call>' + call.function.name + '\\n' + call.function.arguments"

FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(_turns(_PLAIN, _ANSWER, _JSON_CALLS, _RESULT, head=_TOOLS), more={"blank": "missing"}),
    "qwen3": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' %}<assistant>{% if message.reasoning_content is string %}"
            "<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
            "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% if call.function.arguments is string %}"
            "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}{% endif %}",
            _RESULT,
        ),
        thought="reasoning_content",
    ),
    "deepseek_v3": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' and message.content is none %}<assistant>"
            "{% for call in message.tool_calls %}{{ " + _ADDED_CALL + " }}{% endfor %}{% endif %}"
            "{% if message.role == 'assistant' and message.content is not none %}"
            "{{ '<assistant>' + message.content }}{% endif %}",
            _RESULT,
        ),
        more={"arguments": "text", "blank": "null", "empty_is_null": True},
    ),
    "deepseek_r1": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' and 'tool_calls' in message %}{% for call in message.tool_calls %}"
            "{% if message.content is none %}{{ "
            + _ADDED_CALL
            + " }}{% else %}{{ message.content + "
            + _ADDED_CALL
            + " }}"
            "{% endif %}{% endfor %}{% elif message.role == 'assistant' %}{{ '<assistant>' + message.content }}{% endif %}",
            _RESULT,
        ),
        more={"arguments": "text", "blank": "null"},
    ),
    "deepseek_v3.1": Family(
        _turns(
            _PLAIN,
            _ANSWER,
            "{% for call in message.tool_calls or [] %}{% if message.content %}{{ message.content }}{% endif %}"
            "{{ " + _ADDED_CALL + " + '<end>' }}{% endfor %}",
            _RESULT,
        ),
        more={"arguments": "text"},
    ),
    "gpt-oss": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' and 'tool_calls' in message %}"
            "{% if message.content and message.thinking %}{{ raise_exception('Both content and thinking!') }}{% endif %}"
            "{% if message.thinking %}{{ '<analysis>' + message.thinking }}{% elif message.content %}"
            "{{ '<analysis>' + message.content }}{% endif %}"
            "{{ '<call>' + message.tool_calls[0].function.name + (message.tool_calls[0].function.arguments | tojson) }}"
            "{% elif message.role == 'assistant' %}{{ '<final>' + message.content }}{% endif %}",
            "{% if message.role == 'tool' %}{{ '<tool>' + (message.content | tojson) }}{% endif %}",
        ),
        thought="thinking",
    ),
    "glm4.5": Family(
        _turns(
            "{% if message.role != 'tool' %}<{{ message.role }}>{{ text_of(message.content) }}{% endif %}"
            "{% if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}",
            _WALKED_CALLS,
            "{% if message.role == 'tool' %}{% if message.content is string %}<result>{{ message.content }}{% else %}"
            "{% for item in message.content %}<result>{{ item.output if item.output is defined else item }}{% endfor %}"
            "{% endif %}{% endif %}",
            head=_TEXT_OF,
        ),
        joined="tool",
        thought="reasoning_content",
    ),
    "kimi_k2": Family(
        _turns(
            "<{{ message.role }}>{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{% endif %}",
            "{% if message.tool_calls %}{% if message.content %}{{ message.content }}{% endif %}"
            "{% for call in message.tool_calls %}{{ call.id }}{{ call.function.arguments | tojson }}"
            "{{ call.function.name }}{% endfor %}"
            "{% elif message.content is not none %}{{ text_of(message.content) }}{% endif %}",
            head=_TEXT_OF,
        ),
        joined="caller",
    ),
    "mistral": Family(
        _turns(
            "{% if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}"
            "{% if message.role == 'system' %}{% if not loop.first %}{{ raise_exception('Late.') }}{% endif %}"
            "{{ message.content }}{% endif %}",
            "{% for call in message.tool_calls or [] %}{% if call.id is not defined or call.id | length != 9 %}"
            "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
            """[TOOL_CALLS]{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, """
            """"id": "{{ call.id }}"}{% endfor %}""",
            _ANSWER,
            "{% if message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('Id!') }}"
            "{% endif %}[TOOL_RESULTS]{{ message.tool_call_id + message.content }}{% endif %}",
        ),
        more={"short_ids": True},
    ),
    "ministral_reasoning": Family(
        _turns(
            "{% if message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content }}{% elif message.content is string %}"
            "{{ '<' + message.role + '>' + message.content }}{% elif message.content | length > 0 %}<{{ message.role }}>"
            "{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}"
            "{% elif block.type == 'thinking' %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% else %}"
            "{{ raise_exception('Only text and thinking.') }}{% endif %}{% endfor %}{% endif %}",
            "{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}"
            "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
            "{% endfor %}",
        ),
        joined="tool",
        thought="part",
    ),
    "llama3.1": Family(
        _turns(
            _PLAIN,
            _ANSWER,
            "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('One!') }}{% endif %}"
            """{% set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": """
            "{{ call.arguments | tojson }}}{% endif %}",
            "{% if message.role == 'tool' %}{% if message.content is mapping or message.content is iterable %}"
            "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}{% endif %}",
        ),
    ),
    "smollm3": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' %}{{ '<assistant>' + (message.content if message.content else '') }}"
            "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
            "{% endif %}",
            _RESULT,
        ),
        more={"arguments": "text"},
    ),
    "gemma2": Family(
        _turns(
            "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            "<{{ 'model' if message.role == 'assistant' else message.role }}>{{ message.content | trim }}"
        ),
        with_tools=False,
    ),
    "gemma4": Family(
        _turns(
            "{% set thought = message.get('reasoning') or message.get('reasoning_content') %}"
            "<{{ message.role }}>{% if thought %}<think>{{ thought }}{% endif %}"
            "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
            "{% if call.function.arguments is mapping %}{% for key, value in call.function.arguments | dictsort %}"
            "{{ key }}:{{ value }},{% endfor %}{% else %}{{ call.function.arguments }}{% endif %}{% endfor %}",
            "{% if message.content is string %}{{ message.content | trim }}{% elif message.content is iterable %}"
            "{% for item in message.content %}{{ item.text | trim }}{% endfor %}{% endif %}",
        ),
        joined="",
        thought="reasoning",
    ),
    "seed_oss": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' %}{% if message.reasoning_content is defined %}"
            "<seed:think>{{ message.reasoning_content }}{% endif %}"
            "{% if message.content is string %}{{ message.content }}{% endif %}{% endif %}",
            _WALKED_CALLS,
            _RESULT,
        ),
        thought="reasoning_content",
    ),
    "minimax_m2": Family(
        _turns(
            "<{{ message.role }}>{{ text_of(message.content) }}",
            "{% for call in message.tool_calls or [] %}<invoke>{{ call.function.name }}"
            "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %}{% endfor %}",
            head=_TEXT_OF,
        ),
        joined="",
    ),
    "command-r": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' %}<assistant>{{ message.content }}{% if message.tool_calls %}Action:"
            "{% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson(indent=4) }}"
            "{% endfor %}{% endif %}{% endif %}",
            _RESULT,
        ),
    ),
    "phi3": Family(
        _turns("{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"),
        with_tools=False,
    ),
    "hermes": Family(
        _turns(
            _PLAIN,
            "{% if message.role == 'assistant' %}{% if message.content is defined and message.content is not none %}"
            "{{ '<assistant>' + message.content }}{% endif %}{% for call in message.tool_calls or [] %}<tool_call>"
            "{{ call.function | tojson }}{% endfor %}{% endif %}",
            _RESULT,
            head=_TOOLS,
        ),
    ),
    "step3.5": Family(
        _turns(
            "<{{ message.role }}>{{ text_of(message.content) }}"
            "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}{% endif %}",
            _WALKED_CALLS,
            head=_TEXT_OF,
        ),
        joined="",
        thought="reasoning_content",
    ),
    "functionary": Family(
        _turns(
            _PLAIN,
            _ANSWER,
            "{% for call in message.tool_calls or [] %}{% if message.content %}{{ '>>>all' + message.content }}{% endif %}"
            "{{ '>>>' + call.function.name + '\\n' + call.function.arguments }}{% endfor %}",
            _RESULT,
        ),
        more={"arguments": "text"},
    ),
    "llava": Family(
        _turns(
            "<{{ message.role }}>{% for part in message.content if part.type == 'text' %}{{ part.text }}|{% endfor %}"
        ),
        joined="",
        more={"listed": True},
        with_tools=False,
    ),
}
