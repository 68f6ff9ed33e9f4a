"""Formats of tool calls and reasoning, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from jaxllm.errors import UserError
from jaxllm_server.parsers.harmony import HarmonyParser
from jaxllm_server.parsers.json_calls import GraniteParser, HermesParser, LlamaParser, MistralParser
from jaxllm_server.parsers.named_calls import DeepSeekParser, KimiParser
from jaxllm_server.parsers.python_calls import PythonicParser
from jaxllm_server.parsers.reasoning import HarmonyChannels, ReasoningMode, TaggedReasoning
from jaxllm_server.parsers.tagged_calls import GlmParser, MiniMaxParser, Qwen3CoderParser, SeedOssParser
from jaxllm_server.parsers.tool_parsers import ToolParser

AUTO = "auto"
Signs: TypeAlias = tuple[tuple[str, ...], ...]  # a template matches if it contains all texts of a tuple


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A model family's tool-call format."""

    parser: type[ToolParser]
    signs: Signs = ()
    ids: Literal["", "mistral", "kimi_k2"] = ""  # format of call ids that the model requires


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """A model family's reasoning format."""

    form: TaggedReasoning | HarmonyChannels
    signs: Signs = ()


_THINK = ("<think>",), ("</think>",)
_GRANITE = (
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)

# The first match applies: unspecific rows are last.
TOOL_PARSERS: Mapping[str, ToolForm] = MappingProxyType(
    {
        "openai": ToolForm(HarmonyParser, (("<|channel|>", "<|message|>"),)),
        "kimi_k2": ToolForm(KimiParser, (("<|tool_call_begin|>",),), ids="kimi_k2"),
        "deepseek_v3": ToolForm(DeepSeekParser, (("<｜tool▁call▁begin｜>", "```json"),)),
        "deepseek_v31": ToolForm(DeepSeekParser, (("<｜tool▁call▁begin｜>",),)),
        "mistral": ToolForm(MistralParser, (("[TOOL_CALLS]",),), ids="mistral"),
        "llama4_pythonic": ToolForm(PythonicParser, (("<|python_start|>",), ("<|header_start|>", "[func_name1("))),
        "pythonic": ToolForm(PythonicParser, (("[func_name1(",),)),
        "llama3_json": ToolForm(LlamaParser, (("<|python_tag|>",), ('"parameters": dictionary of argument name',))),
        "granite": ToolForm(GraniteParser, (("<|tool_call|>",), ("<tool_call>", "JSON list"))),
        "minimax_m2": ToolForm(MiniMaxParser, (("<minimax:tool_call>",), ("minimax:tool_call", "<invoke name="))),
        "seed_oss": ToolForm(SeedOssParser, (("<seed:tool_call>",),)),
        "qwen3_coder": ToolForm(Qwen3CoderParser, (("<tool_call>", "<function="),)),
        "glm45": ToolForm(GlmParser, (("<tool_call>", "<arg_key>"),)),
        "hermes": ToolForm(HermesParser, (("<tool_call>",),)),
        # vLLM's aliases.
        "glm47": ToolForm(GlmParser),
        "granite4": ToolForm(HermesParser),
        "llama4_json": ToolForm(LlamaParser),
        "qwen3_xml": ToolForm(Qwen3CoderParser),
    }
)
REASONING_PARSERS: Mapping[str, ReasoningForm] = MappingProxyType(
    {
        "openai_gptoss": ReasoningForm(HarmonyChannels(), (("<|channel|>", "analysis"),)),
        "mistral": ReasoningForm(TaggedReasoning(("[THINK]",), ("[/THINK]",), ReasoningMode.IF_ASKED), (("[THINK]",),)),
        "granite": ReasoningForm(
            TaggedReasoning(*_GRANITE, ReasoningMode.IF_ASKED), (("Here is my thought process:",),)
        ),
        "seed_oss": ReasoningForm(
            TaggedReasoning(("<seed:think>",), ("</seed:think>",), ReasoningMode.BY_ITSELF), (("<seed:think>",),)
        ),
        # May begin calls without an end tag (vllm/reasoning/kimi_k2_reasoning_parser.py).
        "kimi_k2": ReasoningForm(
            TaggedReasoning(*_THINK, ReasoningMode.ALWAYS, kept_ends=("<|tool_calls_section_begin|>",)),
            (("<think>", "<|tool_calls_section_begin|>"),),
        ),
        "deepseek_v3": ReasoningForm(
            TaggedReasoning(*_THINK, ReasoningMode.IF_OPENED), (("<｜Assistant｜>", "</think>", "thinking"),)
        ),
        # Some revisions' template does not open the reasoning.
        "deepseek_r1": ReasoningForm(
            TaggedReasoning(*_THINK, ReasoningMode.ALWAYS), (("<｜Assistant｜>", "</think>"),)
        ),
        "glm45": ReasoningForm(TaggedReasoning(*_THINK, ReasoningMode.BY_ITSELF), (("[gMASK]", "</think>"),)),
        "qwen3": ReasoningForm(TaggedReasoning(*_THINK, ReasoningMode.BY_ITSELF), (("</think>",),)),
        "glm47": ReasoningForm(TaggedReasoning(*_THINK, ReasoningMode.BY_ITSELF)),
        "minimax_m2": ReasoningForm(TaggedReasoning(*_THINK, ReasoningMode.ALWAYS)),
    }
)


def check_name(parameter: str, name: str | None, forms: Mapping[str, ToolForm] | Mapping[str, ReasoningForm]) -> None:
    if name is not None and name not in (AUTO, *forms):
        raise UserError(f"{parameter} must be one of {', '.join(sorted((AUTO, *forms)))}, got {name!r}.", parameter)


def form_of(template: str, forms: Mapping[str, ToolForm] | Mapping[str, ReasoningForm]) -> str | None:
    for name, form in forms.items():
        if any(all(text in template for text in signs) for signs in form.signs):
            return name
    return None
