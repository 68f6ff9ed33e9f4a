"""Parse `quantization_config`. Unsupported options are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields
from jaxllm.linear_expression import Expression
from jaxllm.model.parameters import Scheme
from pallas_kernels import Kind

# "packed" 4-byte words of adjacent columns, or "plain" numbers (compressed-tensors); transposed words along columns
# ("gptq") or rows ("awq"); blocks of 32 ("mxfp4").
Layout = Literal["packed", "plain", "gptq", "awq", "mxfp4"]

_KEY = "quantization_config"
_LONGEST_PATTERN = 500  # characters
_expression = lru_cache(maxsize=64)(Expression)


@dataclass(frozen=True)
class StoredFormat:
    """A checkpoint's quantization format.

    `block` rows share scales. `scale` is the suffix of scale tensors; `zero_shift` is added to stored zeros. `targets`
    and `ignored` are expressions after "re:", or parts of dotted module names.
    """

    method: str
    layout: Layout
    scheme: Scheme
    block: int = 1
    scale: str = "weight_scale"
    zero_shift: int = 0
    packs_zeros: bool = False
    targets: tuple[str, ...] = ("Linear",)
    ignored: tuple[str, ...] = ()
    has_head: bool = False

    def covers(self, module: str) -> bool:
        if self.layout == "mxfp4":
            return "experts" in module.split(".")
        if module == "lm_head" and not self.has_head:
            return False
        return not self.leaves_out(module)

    def leaves_out(self, module: str) -> bool:
        try:
            is_meant = "Linear" in self.targets or any(_names(target, module) for target in self.targets)
            return not is_meant or any(_names(name, module) for name in self.ignored)
        except ValueError as error:
            raise UserError(f"config.json, {_KEY}: an expression cannot be followed: {error}.", _KEY) from None


def read_stored(config: Mapping[str, Any]) -> StoredFormat | None:
    fields = Fields(config)
    if not fields.has(_KEY):
        return None
    own = fields.inner(_KEY)
    if not own.has("quant_method"):
        raise UserError(
            f"config.json: {_KEY} has no quant_method, so its format is unknown; it must be one of "
            f"{', '.join(_READERS)}.",
            _KEY,
        )
    method = own.take("quant_method", str)
    if method not in _READERS:
        raise UserError(
            f"config.json: {_KEY} ({method:.80}) is not supported, only {', '.join(_READERS)}; "
            "use such a checkpoint or an unquantized one.",
            _KEY,
        )
    return _READERS[method](own)


def _names(name: str, module: str) -> bool:
    """Whether an expression (prefix) or name (consecutive components) matches a module."""
    if name.startswith("re:"):
        return _expression(name.removeprefix("re:")).match(module)
    return f".{name}." in f".{module}."


def _module_names(fields: Fields, key: str) -> tuple[str, ...]:
    names = fields.raw(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"config.json, {_KEY}: {key} must be a list of names, got {names!r:.80}.", _KEY)
    for name in names:
        try:
            if len(name) > _LONGEST_PATTERN:
                raise ValueError(f"it is longer than {_LONGEST_PATTERN} characters")
            _names(name, "")
        except ValueError as error:
            raise UserError(f"config.json, {_KEY}: {key} has no expression in {name!r:.80}: {error}.", _KEY) from None
    return tuple(names)


def _integer_kind(fields: Fields, key: str) -> Kind:
    fields.take(key, int)
    fields.only(key, 4, 8)
    return "int4" if fields.take(key, int) == 4 else "int8"


def _group(fields: Fields, key: str = "group_size") -> int | None:
    size = fields.take(key, int)
    return None if size == -1 else fields.size(key)


def _compressed_tensors(fields: Fields) -> StoredFormat:
    """Read compressed-tensors (github.com/vllm-project/compressed-tensors)."""
    fields.only("quantization_status", "compressed")
    fields.only("transform_config", {})  # rotated activations
    fields.inner("sparsity_config").only("format", "dense")
    groups = fields.raw("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UserError(f"config.json, {_KEY}: config_groups must be one group; several are not supported.", _KEY)
    group = fields.inner("config_groups").inner(next(iter(groups)))
    weights = group.inner("weights")
    form = group.take("format", str, fields.take("format", str))
    known = {"pack-quantized": "int", "int-quantized": "int", "naive-quantized": None, "float-quantized": "float"}
    if form not in known:
        raise UserError(f"config.json, {_KEY}: format {form!r:.80} is not one of {', '.join(known)}.", _KEY)
    number = weights.take("type", str, "int")
    weights.only("type", *filter(None, [known[form]] if known[form] else ["int", "float"]))
    if number == "float":
        weights.only("num_bits", 8)
        weights.only("symmetric", True)
    kind: Kind = "float8" if number == "float" else _integer_kind(weights, "num_bits")
    weights.only("dynamic", False)
    strategy = weights.take("strategy", str, "group" if weights.has("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise UserError(f"config.json, {_KEY}: strategy {strategy!r:.80} is not supported for weights.", _KEY)
    rows, columns = 1, None
    if strategy == "group":
        columns = _group(weights)
    elif strategy == "block":
        rows, columns = _block_size(weights, "block_structure")
    has_zeros = not weights.take("symmetric", bool, True)
    return StoredFormat(
        "compressed-tensors",
        "packed" if form == "pack-quantized" else "plain",
        Scheme(kind, columns, has_zeros),
        block=rows,
        packs_zeros=form == "pack-quantized" and strategy in ("group", "channel"),
        targets=_module_names(group, "targets"),
        ignored=_module_names(fields, "ignore"),
        has_head=True,
    )


def _block_size(fields: Fields, key: str) -> tuple[int, int]:
    rows, columns = fields.numbers(key, 2)
    if rows < 1 or columns < 1 or rows != int(rows) or columns != int(columns):
        raise UserError(f"config.json, {_KEY}: {key} must be two sizes, got [{rows:g}, {columns:g}].", _KEY)
    return int(rows), int(columns)


def _fp8(fields: Fields) -> StoredFormat:
    """Read fp8 in blocks (DeepSeek-V3, Qwen3-FP8), or with one scale per tensor."""
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    rows, columns = _block_size(fields, "weight_block_size") if fields.has("weight_block_size") else (1, None)
    return StoredFormat(
        "fp8",
        "plain",
        Scheme("float8", columns),
        block=rows,
        scale="weight_scale" if columns is None else "weight_scale_inv",
        ignored=_module_names(fields, "modules_to_not_convert") + _module_names(fields, "ignored_layers"),
    )


def _gptq(fields: Fields) -> StoredFormat:
    """Read AutoGPTQ and GPTQModel; version 1 stores zeros minus one."""
    fields.only("dynamic", {})  # per-module bits
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    is_second = fields.take("checkpoint_format", str, "gptq") == "gptq_v2"
    return StoredFormat(
        "gptq",
        "gptq",
        Scheme(_integer_kind(fields, "bits"), _group(fields), has_zeros=not fields.take("sym", bool, True)),
        zero_shift=0 if is_second else 1,
        ignored=_module_names(fields, "modules_to_not_convert"),
        has_head=fields.take("lm_head", bool, False),
    )


def _awq(fields: Fields) -> StoredFormat:
    for key in ("bits", "w_bit"):
        fields.only(key, 4)
    fields.only("zero_point", True)
    if fields.take("version", str, "gemm").lower() != "gemm":
        fields.only("version", "gemm")
    size = "group_size" if fields.has("group_size") else "q_group_size"
    ignored = _module_names(fields, "modules_to_not_convert")
    return StoredFormat("awq", "awq", Scheme("int4", _group(fields, size), has_zeros=True), ignored=ignored)


def _mxfp4(fields: Fields) -> StoredFormat:
    """Read MXFP4: GPT-OSS's experts in blocks of 32 (OCP Microscaling Formats 1.0)."""
    return StoredFormat("mxfp4", "mxfp4", Scheme("float4", 32), ignored=_module_names(fields, "modules_to_not_convert"))


_READERS: dict[str, Callable[[Fields], StoredFormat]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
