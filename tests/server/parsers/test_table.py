"""Detection of tool-call and reasoning formats from chat templates, by parts of published models' templates."""

from __future__ import annotations

import pytest

from jaxllm_server.parsers.table import REASONING_PARSERS, TOOL_PARSERS, form_of
from tests.support.naive import distinct

SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
THINK = "<think>{{ message.reasoning_content }}</think>"
# Parts of a template, its tool-call format, and its reasoning format.
TEMPLATES = [
    ("<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>", None, None),
    ("<|im_start|>{{ role }}<tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes", None),  # Qwen2.5
    ("<|im_start|>{{ role }}" + THINK + '<tool_call>\n{"name": "', "hermes", "qwen3"),
    ("<|im_start|>{{ role }}<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3_coder", None),
    ("<|im_start|>{{ role }}<think>\n<tool_call>\n<function=</think>", "qwen3_coder", "qwen3"),  # Qwen3.5
    ('{{ "<|python_tag|>" + name }}', "llama3_json", None),
    ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", None),
    ("Respond in the format [func_name1(params_name1=params_value1, func_name2(params)]", "pythonic", None),
    ("<|header_start|>system<|header_end|>[func_name1(param1=value1, param2=value2)]", "llama4_pythonic", None),
    ("[INST]{{ message }}[/INST][TOOL_CALLS] [{{ calls }}]", "mistral", None),
    ("[THINK]Your thoughts[/THINK][TOOL_CALLS]{{ name }}[ARGS]", "mistral", "mistral"),
    ("<|start_of_role|>{{ role }}'respond with <|tool_call|> followed by a JSON list of tools used'", "granite", None),
    ("Here is my thought process: … Here is my response: … <tool_call> followed by a JSON list", "granite", "granite"),
    (
        "<｜Assistant｜><think>\n</think><｜tool▁call▁begin｜>function<｜tool▁sep｜>```json",
        "deepseek_v3",
        "deepseek_r1",
    ),
    (
        "{% if not thinking %}<｜Assistant｜></think>{% endif %}<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
        "deepseek_v31",
        "deepseek_v3",
    ),
    (SECTION, "kimi_k2", None),
    (THINK + SECTION, "kimi_k2", "kimi_k2"),
    ("[gMASK]<sop>" + THINK + "<tool_call>{{ name }}\n<arg_key>", "glm45", "glm45"),
    ("{% set begin = '<minimax:tool_call>' %}]~b]ai<think>\n</think>", "minimax_m2", "qwen3"),
    ("{% set begin = '<seed:tool_call>' %}<function={% set end = '<seed:think>' %}", "seed_oss", "seed_oss"),
    ("<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>", "openai", "openai_gptoss"),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), TEMPLATES)
def test_a_template_names_its_forms(template: str, calls: str | None, reasoning: str | None) -> None:
    assert form_of(template, TOOL_PARSERS) == calls
    assert form_of(template, REASONING_PARSERS) == reasoning


def test_every_form_is_chosen_for_a_template() -> None:
    assert {calls for _, calls, _ in TEMPLATES if calls} == set(distinct(TOOL_PARSERS))
    assert {reasoning for *_, reasoning in TEMPLATES if reasoning} == set(distinct(REASONING_PARSERS))
