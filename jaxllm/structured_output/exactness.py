"""Rewrite JSON schemas so that llguidance follows them exactly, or refuse them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from jaxllm.checks import shown
from jaxllm.errors import UserError
from jaxllm.structured_output.expressions import translate_pattern

# Without subschemas; with subschemas by name.
DATA = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired", "type"})
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")

# Others are annotations.
_FORMATS = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)
# llguidance accepts February 29 in every year.
_LEAP_DAY = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
_OTHER_DAY = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))"
_DATE = f"^(?:{_LEAP_DAY}|{_OTHER_DAY})"

_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_EXACT = 2**53  # llguidance converts numbers to floats
_MOST_POWER = 22  # serde_json scales by at most this power of ten exactly
_INTEGERS = (-(2**63), 2**63 - 1)  # llguidance clamps integer bounds to this
_DIGITS = 15  # significant, of an inclusive bound that replaces an exclusive one
_MOST_PRODUCT = 2**32  # llguidance multiplies two `multipleOf` in 32 bits


def exact(schema: Any) -> Any:
    """Return an equivalent schema that llguidance follows exactly; raise UserError if impossible."""
    objects = list(_objects(schema))
    merges = any(map(_merges, objects))
    if merges:
        _check_multiples(objects)
    return _exact(schema, merges)


def _refusal(said: str) -> UserError:
    return UserError(f"json has {said}.", "structured_outputs")


def _exact(schema: Any, merges: bool) -> Any:
    if isinstance(schema, list):
        return [_exact(item, merges) for item in schema]
    if not isinstance(schema, dict):
        return schema
    written: dict[str, Any] = {}
    for name, value in schema.items():
        if name in DATA:
            written[name] = value
        elif name in BY_NAME and isinstance(value, dict):
            written[name] = {key: _exact(item, merges) for key, item in value.items()}
        else:
            written[name] = _exact(value, merges)
    _write_numbers(written, merges)
    _write_texts(written)
    if not isinstance(written.get("items"), list):
        written.pop("additionalItems", None)  # llguidance would ignore prefixItems
    if written.get("uniqueItems") is False:
        del written["uniqueItems"]
    return _grouped(written)


def _grouped(schema: dict[str, Any]) -> dict[str, Any]:
    """Make interdependent keywords adjacent: llguidance separates them otherwise."""
    for group in (
        ("properties", "patternProperties", "additionalProperties"),
        ("prefixItems", "items", "additionalItems"),
    ):
        names = [name for name in group if name in schema]
        if len(names) > 1:
            ordered: dict[str, Any] = {}
            for name, value in schema.items():
                if name == names[0]:
                    ordered |= {each: schema[each] for each in names}
                elif name not in names:
                    ordered[name] = value
            schema = ordered
    return schema


def _write_texts(schema: dict[str, Any]) -> None:
    form = schema.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        del schema["format"]
    patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    if patterns:
        schema["pattern"] = translate_pattern(patterns[0])
    if form in ("date", "date-time"):
        written = translate_pattern(_DATE)
        if patterns:
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": written}]
        else:
            schema["pattern"] = written
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        translated = {translate_pattern(pattern): value for pattern, value in by_pattern.items()}
        if len(translated) < len(by_pattern):
            raise _refusal("two patternProperties that match the same names; join them in one")
        schema["patternProperties"] = translated


def _write_numbers(schema: dict[str, Any], merges: bool) -> None:
    for name in (*_LOW, *_HIGH, "multipleOf"):
        if _is_number(schema.get(name)):
            _check_number(name, schema[name], name.startswith("exclusive"))
    if schema.get("multipleOf") == 0:
        raise _refusal("a multipleOf of 0; it must be above 0")
    for value in _numbers([schema.get("const"), schema.get("enum")]):
        _check_number("a value", value, False)
    # If both bounds have one integer part, llguidance accepts an integer that one of them excludes.
    for name, plain, sign, others in (
        ("exclusiveMinimum", "minimum", 1, _HIGH),
        ("exclusiveMaximum", "maximum", -1, _LOW),
    ):
        bound = schema.get(name)
        if not _is_number(bound) or bound != int(bound) or bound * sign < 0:
            continue
        near = [schema[each] for each in others if _is_number(schema.get(each))]
        if merges or any(0 < (each - bound) * sign < 1 for each in near):
            power = -_MOST_POWER if bound == 0 else len(str(abs(int(bound)))) - _DIGITS
            inside = float(Decimal(int(bound)) + sign * Decimal(10) ** min(power, 0))
            given = schema.get(plain)
            if not _is_number(given) or (given - inside) * sign < 0:
                schema[plain] = inside
            del schema[name]
    _write_prefixes(schema)


def _write_prefixes(schema: dict[str, Any]) -> None:
    """Add the decimal prefixes of a bound as allowed values: below 0.512 llguidance rejects 0.5."""
    types = schema.get("type", "number")
    if "number" not in (types if isinstance(types, list) else [types]):
        return
    parts = []
    for name in (*_LOW, *_HIGH):
        bound = schema.get(name)
        if not _is_number(bound) or (bound > 0) is not (name in _HIGH):
            continue
        whole, _, places = f"{Decimal(repr(bound)):f}".partition(".")
        numbers = {float(f"{whole}.{places[:end]}") for end in range(1, len(places))} - {bound}
        if numbers:
            parts.append({"anyOf": [{name: schema.pop(name)}, {"enum": sorted(numbers)}]})
    if parts:
        schema["allOf"] = [*schema.get("allOf", []), *parts]


def _check_number(name: str, value: float, excludes: bool) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        return
    _, digits, power = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(power, int)
    if value == int(value) and abs(value) > _EXACT:
        is_exact = (abs(value) < _INTEGERS[1] and int(float(value)) == value) or value in _INTEGERS
        is_exact = is_exact and not excludes
    else:
        is_exact = int("".join(map(str, digits))) < _EXACT and abs(power) <= _MOST_POWER
    if not is_exact:
        raise _refusal(f"{name} {shown(value)}, a number that is not supported exactly; use fewer digits")


def _check_multiples(objects: list[dict[str, Any]]) -> None:
    """Refuse multiples whose least common multiple overflows in llguidance."""
    given = {Decimal(str(found["multipleOf"])) for found in objects if _is_number(found.get("multipleOf"))}
    given = {abs(multiple) for multiple in given if multiple}
    if len(given) < 2:
        return
    places = max(0, *(-int(multiple.normalize().as_tuple().exponent) for multiple in given))
    scaled = [int(multiple.scaleb(places)) for multiple in given]
    if places > 9 or math.lcm(*scaled) * max(scaled) >= _MOST_PRODUCT:
        raise _refusal(
            f"multipleOf of {min(given)} and of {max(given)} in a schema that joins parts; their "
            "least common multiple is too large"
        )


def _merges(schema: dict[str, Any]) -> bool:
    bounds = any(name in schema for name in (*_LOW, *_HIGH, "multipleOf"))
    return "allOf" in schema or (bounds and any(name in schema for name in _COMBINED))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[float]:
    if _is_number(value):
        yield value
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
