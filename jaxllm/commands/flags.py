"""Command line flags generated from dataclass fields."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxllm.config import DTYPE_NAMES, NOT_BUILT, WITHOUT_EFFECT, EngineConfig
from jaxllm.errors import UserError
from jaxllm.sampling_fields import MODEL, names_in
from jaxllm.sampling_params import SamplingParams

# First in `--help`.
COMMON = (
    *("host", "port", "grpc_port", "api_key", "served_model_name", "chat_template", "dtype", "quantization"),
    *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size"),
)
IDLE = "without_effect"  # options key: given ones without effect
_SHORT = {"tensor_parallel_size": ("-tp",), "n": ("-n",)}
_SHORT |= {"pipeline_parallel_size": ("-pp",), "data_parallel_size": ("-dp",)}
_UNITS = {"": 1, **{letter: 1000 ** (power + 1) for power, letter in enumerate("kmgt")}}
_UNITS |= {letter: 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
_OF_THE_MODEL = {*names_in(SamplingParams, MODEL).values()} - {"max_tokens"}


def flag_of(field: str, cls: type, has_sampling: bool = False) -> str:
    name = "engine_seed" if has_sampling and (cls, field) == (EngineConfig, "seed") else field
    return "--" + name.replace("_", "-")


def add_engine_flags(
    group: argparse._ArgumentGroup,
    has_sampling: bool = True,
    skipped: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every field of `EngineConfig` but the model, and hidden ones for vLLM's.

    `has_sampling`: `--seed` is a request's, the engine's is `--engine-seed`.
    """
    add_flags(group, EngineConfig, {"model", *skipped}, defaults, has_sampling)
    for name, taken in NOT_BUILT.items():
        if name not in skipped:
            _add_hidden(group, name, _NotBuilt, taken)
    for name, default in WITHOUT_EFFECT.items():
        if name not in skipped:
            _add_hidden(group, name, _WithoutEffect, (default,))


def add_common_flags(parser: argparse.ArgumentParser, server: type) -> None:
    for cls in (server, EngineConfig):
        others = {field.name for field in fields(cls)} - set(COMMON)
        add_flags(parser, cls, skipped=others)


def add_sampling_flags(group: argparse._ArgumentGroup, max_tokens: int, skipped: Collection[str] = ()) -> None:
    skipped = {*skipped, *(field.name for field in fields(SamplingParams) if field.metadata["help"] is None)}
    add_flags(group, SamplingParams, skipped, {"max_tokens": max_tokens})


def given(options: Mapping[str, Any], cls: type) -> dict[str, Any]:
    prefix = f"{cls.__name__}."
    return {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}


def _add_hidden(group: argparse._ArgumentGroup, name: str, action: type[argparse.Action], taken: Sequence[Any]) -> None:
    """Add a hidden flag of vLLM; `action` accepts all values, or only `taken`, default first."""
    flag = flag_of(name, EngineConfig)
    is_switch = isinstance(taken[0], bool)
    names = (flag, "--no-" + flag[2:]) if is_switch else (*_SHORT.get(name, ()), flag)
    group.add_argument(
        *names,
        action=action,
        const=taken,
        nargs=0 if is_switch else None,
        dest=IDLE,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class _NotBuilt(argparse.Action):
    """Accepts only values that change nothing."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        given, taken = str(option_string), self.const
        if isinstance(taken[0], bool):
            is_taken = taken[0] is not given.startswith("--no-")
        else:
            is_taken = values.lower() in [str(value).lower() for value in taken]
            given += f" {values}"
        if not is_taken:
            raise argparse.ArgumentError(None, f"{given} is not supported by jaxllm yet; remove it")


class _WithoutEffect(argparse.Action):
    """Collects flags of `WITHOUT_EFFECT`, for one warning."""

    def __call__(self, parser: object, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, IDLE, [*getattr(namespace, IDLE, ()), str(option_string)])


def add_flags(
    group: argparse._ActionsContainer,
    cls: type,
    skipped: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    has_sampling: bool = False,
) -> None:
    """Add a flag for each field of a settings class; absent ones leave no entry."""
    kinds = get_type_hints(cls)
    for field in fields(cls):
        if field.name in skipped:
            continue
        default = (defaults or {}).get(field.name, field.default)
        text = field.metadata["help"]
        if default not in (None, (), "", MISSING) and "(default" not in text:
            shown = str(default).lower() if isinstance(default, bool) else default
            text += f" (default: the model's, else {shown})" if field.name in _OF_THE_MODEL else f" (default: {shown})"
        group.add_argument(
            *_SHORT.get(field.name, ()),
            flag_of(field.name, cls, has_sampling),
            dest=f"{cls.__name__}.{field.name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_argument_of(kinds[field.name], field),
        )


def _argument_of(kind: Any, field: Field[Any]) -> dict[str, Any]:
    members = get_args(kind)
    inner = next((member for member in members if member is not type(None)), kind)
    if inner is bool:
        is_opposite = field.name.startswith(("disable_", "no_"))
        return {"action": "store_true" if is_opposite else argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple or isinstance(field.default, tuple) or get_origin(inner) is Sequence:
        # One value per flag: more could consume a positional argument.
        item = (get_args(inner) or members)[0]
        metavar = field.metadata["metavar"] or "NAME"
        if field.metadata["takes_several"]:
            return {"action": "extend", "nargs": "+", "type": str, "metavar": metavar}
        return {"action": "append", "type": integer if item is int else str, "metavar": metavar}
    for literal in (kind, inner):
        if get_origin(literal) is Literal:
            return {"choices": get_args(literal)} | ({"type": _dtype} if field.name == "dtype" else {})
    if get_origin(inner) is Mapping:
        return {"type": _object, "metavar": field.metadata["metavar"]}
    convert = {int: integer, float: float, str: str}[inner]
    if type(None) in members and inner is int:
        convert = _integer_or_none
    return {"type": convert, "metavar": field.metadata["metavar"] or {int: "N", float: "X", str: "NAME"}[inner]}


def _dtype(text: str) -> str:
    return DTYPE_NAMES.get(text, text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def integer(text: str) -> int:
    """Parse an integer, never a fraction; suffixes k, m, g, t are decimal, K, M, G, T binary, as in vLLM."""
    match = re.fullmatch(r"([+-]?\d+)([kmgtKMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (1k is 1000, 1K is 1024)")
    return int(match[1]) * _UNITS[match[2]]


def _integer_or_none(text: str) -> int | None:
    return None if text in ("none", "auto") else integer(text)


def read_config_file(path: str, arguments: Sequence[str]) -> list[str]:
    """Return flags from YAML such as `max-model-len: 4k`, unless in `arguments`."""
    import yaml

    try:
        with open(path, encoding="utf-8") as stream:
            settings = yaml.safe_load(stream) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}", "config") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} must hold names of flags and their values.", "config")
    given = {argument.split("=")[0] for argument in arguments}
    read: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-")
        if given & {flag, "--no-" + flag[2:]}:
            continue
        if isinstance(value, bool):
            read.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list):
            read += [f"{flag}={json.dumps(item) if isinstance(item, dict) else item}" for item in value]
        elif isinstance(value, dict):
            read.append(f"{flag}={json.dumps(value)}")
        elif value is not None or flag in ("--port", "--grpc-port"):
            read.append(f"{flag}={'none' if value is None else value}")
    return read
