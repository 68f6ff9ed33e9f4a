"""Parse PEFT's adapter_config.json: adapted modules, ranks and scales.

Options with which PEFT 0.21 computes anything but scale · B·A·x, and unknown ones, are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import UserError
from jaxllm.linear_expression import Expression, StepBudget

CONFIG = "adapter_config.json"

_WITHOUT_EFFECT = frozenset(
    """
    peft_type peft_version task_type auto_mapping base_model_name_or_path revision inference_mode lora_dropout
    fan_in_fan_out megatron_core runtime_config loftq_config eva_config corda_config lora_ga_config qalora_group_size
    """.split()
)
# With other initializations PEFT changes base weights at each load (layer.py: pissa_init, …); converted adapters have
# `true`.
_PLAIN_BEGINNINGS = (None, True, False, "true", "false", "gaussian", "eva", "orthogonal", "mica")

_Matches = Callable[[str], bool]


@dataclass(frozen=True)
class LoraConfig:
    """Whether a module, by full name, is adapted, and with which rank and scale."""

    is_targeted: _Matches
    rank_of: Callable[[str], int]
    scale_of: Callable[[str], float]


def read_lora_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Read the fields of a PEFT config; raise UserError, naming the field, for an unsupported value."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{CONFIG}: peft_type is {kind!r:.80}; only LORA is supported.", "peft_type")
    left = dict(fields)
    work = StepBudget()
    is_targeted = _read_targets(left, work)
    ranks = _read_table(left, "rank_pattern", _is_rank, work)
    alphas = _read_table(left, "alpha_pattern", _is_number, work)
    rank = _checked("r", left.pop("r", 8), _is_rank)
    alpha = _checked("lora_alpha", left.pop("lora_alpha", 8), _is_number)
    is_stabilized = left.pop("use_rslora", False)
    if not isinstance(is_stabilized, bool):
        raise _refusal("use_rslora", is_stabilized, "must be true or false")
    beginning = left.pop("init_lora_weights", None)
    if (beginning.lower() if isinstance(beginning, str) else beginning) not in _PLAIN_BEGINNINGS:
        said = "changes the base model's weights; save the adapter converted (path_initial_model_for_weight_conversion)"
        raise _refusal("init_lora_weights", beginning, said)
    for name, value in left.items():
        if name not in _WITHOUT_EFFECT and not (value is None or value is False or value in ("", "none", [], {})):
            raise _refusal(name, value, "is not supported; it must be null or left out")

    def rank_of(module: str) -> int:
        return int(ranks(module, rank))

    def scale_of(module: str) -> float:
        own = rank_of(module)
        return float(alphas(module, alpha)) / (math.sqrt(own) if is_stabilized else own)

    return LoraConfig(is_targeted, rank_of, scale_of)


def _read_targets(fields: dict[str, Any], work: StepBudget) -> _Matches:
    """Return a test of whether a module is adapted, as PEFT's check_target_module_exists."""
    targets, excluded = fields.pop("target_modules", None), fields.pop("exclude_modules", None)
    layers, containers = fields.pop("layers_to_transform", None), fields.pop("layers_pattern", None)
    if not targets or not (isinstance(targets, str) or _is_names(targets)):
        raise _refusal("target_modules", targets, "must be a list of modules' names, an expression or all-linear")
    if excluded and not (isinstance(excluded, str) or _is_names(excluded)):
        raise _refusal("exclude_modules", excluded, "must be a list of modules' names or an expression")
    containers = [containers] if isinstance(containers, str) and containers else containers or []
    if not _is_names(containers) or not all(re.fullmatch(r"\w+", name) for name in containers):
        raise _refusal("layers_pattern", containers, "must be the name of the list of layers")
    layers = [layers] if type(layers) is int else layers or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise _refusal("layers_to_transform", layers, "must be a layer's number or a list of them")
    if layers and isinstance(targets, str):
        raise _refusal("layers_to_transform", layers, "needs target_modules to be a list")
    if containers and not layers:
        raise _refusal("layers_pattern", containers, "needs layers_to_transform")
    is_excluded = _named("exclude_modules", excluded or [], work)
    every = isinstance(targets, str) and targets.lower() == "all-linear"
    is_named = _named("target_modules", ".*" if every else targets, work)

    def is_targeted(module: str) -> bool:
        if is_excluded(module) or not is_named(module):
            return False
        if not layers or module in targets:
            return True
        return _layer_of(module, containers) in layers

    return is_targeted


def _layer_of(module: str, containers: list[str]) -> int | None:
    """Return the number after a container's name; without containers, the first in third or later position."""
    parts = module.split(".")
    for container in containers or [None]:
        for place in range(1 if container else 2, len(parts) - 1):
            if parts[place].isdecimal() and container in (None, parts[place - 1]):
                return int(parts[place])
    return None


def _named(field: str, given: str | list[str], work: StepBudget) -> _Matches:
    if isinstance(given, str):
        return _following(field, given, work)
    names = frozenset(given)

    def is_named(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))

    return is_named


def _read_table(
    fields: dict[str, Any], field: str, is_right: Callable[[Any], bool], work: StepBudget
) -> Callable[[str, Any], Any]:
    """Read a table from endings of module names to numbers; return a function of a name and a default.

    The first ending that matches counts.
    """
    table = fields.pop(field, None) or {}
    if not isinstance(table, dict):
        raise _refusal(field, table, "must be an object")
    rows = [
        (_following(field, name, work, r"(?:.*\.)?"), _checked(f"{field} of {name:.80}", value, is_right))
        for name, value in table.items()
    ]

    def find(module: str, default: Any) -> Any:
        return next((value for matches, value in rows if matches(module)), default)

    return find


def _following(field: str, pattern: str, work: StepBudget, before: str = "") -> _Matches:
    try:
        expression = Expression(f"{before}(?:{pattern})", work)
    except ValueError as error:
        raise _refusal(field, pattern, f"is no expression that can be followed: {error}") from None

    def matches(module: str) -> bool:
        try:
            return expression.fullmatch(module)
        except ValueError as error:
            raise _refusal(field, pattern, f"cannot be followed: {error}") from None

    return matches


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # excludes NaN


def _checked(field: str, value: Any, is_right: Callable[[Any], bool]) -> Any:
    if not is_right(value):
        wanted = "a whole number above 0" if is_right is _is_rank else "a number"
        raise _refusal(field, value, f"must be {wanted}")
    return value


def _refusal(field: str, value: Any, said: str) -> UserError:
    return UserError(f"{CONFIG}: {field} = {value!r:.80} {said}.", field)
