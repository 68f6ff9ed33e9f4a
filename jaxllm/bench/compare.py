"""Compare two results: the ratio B / A of each common figure, with confidence intervals.

Reads JSON of `jaxllm bench` and vLLM. One run per side, with details (`ttfts`, `itls`, `latencies`, `samples`):
bootstrap over requests (Efron 1979). Several runs: Welch's interval of mean logarithms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxllm.bench.samples import Groups, read_samples
from jaxllm.errors import UserError

Direction = Literal["higher", "lower"]
Result: TypeAlias = Mapping[str, Any]
RESAMPLES = 1000
AGREEMENT = 0.02  # between a reported figure and its recomputation
_HIGHER = re.compile(r"throughput|goodput|per_s(econd)?$|bandwidth|^completed$|acceptance")
_LOWER = re.compile(
    r"latency|ttft|tpot|itl|e2el|^percentiles\.|^elapsed_time$|^duration$|^failed$|_(us|ms|s|seconds|bytes)$"
)
_STATISTIC = re.compile(r"^(mean|median|std|p\d+(?:\.\d+)?)_(.+)$")
_ONE_VALUE = "no interval: one value a side"
# Keys that differ between runs.
_NOT_SETTINGS = re.compile(
    r"^(date|duration|elapsed_time|timestamp|environment|samples|timeline|max_concurrent_requests)(\.|$)"
    r"|^client\.(?!processes$)"
)


class Samples(NamedTuple):
    """Values of one kind, by request."""

    values: np.ndarray  # ascending
    owners: np.ndarray  # request indices
    num_owners: int


class Comparison(NamedTuple):
    """A figure of both sides; geometric means over several runs."""

    name: str
    a: float
    b: float
    better: Direction
    interval: tuple[float, float] | None  # of the ratio
    reason: str  # why no interval is given

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None

    @property
    def verdict(self) -> str:
        if self.interval is None:
            return self.reason
        low, high = self.interval
        if low <= 1 <= high:
            return "no difference shown"
        return "B is better" if (low > 1) == (self.better == "higher") else "B is worse"


def compare(
    a: Sequence[Result], b: Sequence[Result], confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> list[Comparison]:
    """Compare each figure that all results contain, with an interval of B / A; raise `UserError` without any."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence must be between 0 and 1, got {confidence!r}.", "confidence")
    sides = [[_leaves(result) for result in side] for side in (a, b)]
    everyone = [leaves for side in sides for leaves in side]
    directions: dict[str, Direction] = {
        name: better
        for name in everyone[0]
        if (better := direction(name)) is not None and all(_is_number(leaves.get(name)) for leaves in everyone)
    }
    if not directions:
        raise UserError("the results have no figure in common: are they from the same benchmark?")
    details = [
        {kind: _sorted(groups) for kind, groups in read_samples(side[0]).items()} if len(side) == 1 else {}
        for side in (a, b)
    ]
    random = np.random.default_rng(seed)
    drawn = [_draw(kinds, resamples, random) for kinds in details]
    comparisons = []
    for name, better in directions.items():
        values = [np.array([float(leaves[name]) for leaves in side]) for side in sides]
        interval, reason = None, _ONE_VALUE
        if min(len(a), len(b)) > 1:
            interval, reason = _welch(values[0], values[1], confidence)
        elif len(a) == len(b) == 1:
            replicas = [
                _replicas(name, kinds, weights, float(value[0]))
                for kinds, weights, value in zip(details, drawn, values, strict=True)
            ]
            interval, reason = _bootstrap(replicas[0], replicas[1], confidence)
        comparisons.append(Comparison(name, _mean(values[0]), _mean(values[1]), better, interval, reason))
    return comparisons


def direction(name: str) -> Direction | None:
    if _HIGHER.search(name):
        return "higher"
    return "lower" if _LOWER.search(name) else None


def figures(result: Result) -> dict[str, float]:
    return {name: leaf for name, leaf in _leaves(result).items() if _is_number(leaf) and direction(name) is not None}


def differences(a: Sequence[Result], b: Sequence[Result]) -> list[str]:
    first, second = ([{**_settings(result), **_environment(result)} for result in side] for side in (a, b))
    names = dict.fromkeys(name for leaves in (*first, *second) for name in leaves)
    lines = []
    for name in names:
        left, right = (list(dict.fromkeys(_shown(leaves.get(name)) for leaves in side)) for side in (first, second))
        if left != right:
            lines.append(f"{name}: {' and '.join(left)} in A, {' and '.join(right)} in B")
    return lines


def table(comparisons: Sequence[Comparison], confidence: float = 0.95) -> str:
    width = max(len(comparison.name) for comparison in comparisons)
    lines = [f"{'figure':{width}} {'A':>12} {'B':>12} {'B/A':>8} {f'{confidence:.0%} interval':>16}  better"]
    for one in comparisons:
        ratio = "–" if one.ratio is None else f"{one.ratio:.3f}"
        interval = "–" if one.interval is None else f"{one.interval[0]:.3f} – {one.interval[1]:.3f}"
        verdict = "" if one.reason == _ONE_VALUE else f": {one.verdict}"
        lines.append(f"{one.name:{width}} {one.a:12.6g} {one.b:12.6g} {ratio:>8} {interval:>16}  {one.better}{verdict}")
    if any(one.reason == _ONE_VALUE for one in comparisons):
        lines.append(
            f"–: {_ONE_VALUE}; several files a side (--a, --b) give all one, and bench serve --save-detailed the "
            "latencies"
        )
    return "\n".join(lines)


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            name: leaf
            for key, inner in value.items()
            if not (prefix == "" and key in ("samples", "timeline", "environment"))
            for name, leaf in _leaves(inner, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {} if isinstance(value, list) else {prefix: value}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _settings(result: Result) -> dict[str, Any]:
    leaves = _leaves(result).items()
    return {name: leaf for name, leaf in leaves if direction(name) is None and not _NOT_SETTINGS.search(name)}


def _environment(result: Result) -> dict[str, Any]:
    inner = result.get("environment", {})
    ignored = ("date", "command")
    return {f"environment.{name}": leaf for name, leaf in _leaves(inner).items() if name not in ignored}


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _mean(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()) if (values > 0).all() and len(values) > 1 else values.mean())


def _welch(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[tuple[float, float] | None, str]:
    if (a <= 0).any() or (b <= 0).any():
        return None, "no interval: not all values are positive"
    from scipy.special import stdtrit

    left, right = np.log(a), np.log(b)
    parts = np.array([left.var(ddof=1) / len(left), right.var(ddof=1) / len(right)])
    center, error = right.mean() - left.mean(), np.sqrt(parts.sum())
    if error == 0:
        return (float(np.exp(center)), float(np.exp(center))), ""
    freedom = parts.sum() ** 2 / (parts**2 / (np.array([len(left), len(right)]) - 1)).sum()
    reach = float(stdtrit(freedom, 0.5 + confidence / 2)) * error
    return (float(np.exp(center - reach)), float(np.exp(center + reach))), ""


def _sorted(groups: Groups) -> Samples:
    values = np.array([value for group in groups for value in group], float)
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    return Samples(values[order], owners[order], len(groups))


def _draw(kinds: Mapping[str, Samples], resamples: int, random: np.random.Generator) -> dict[int, np.ndarray]:
    counts = dict.fromkeys(samples.num_owners for samples in kinds.values())
    return {count: random.multinomial(count, np.full(count, 1 / count), resamples) for count in counts}


def _replicas(
    name: str, kinds: Mapping[str, Samples], drawn: Mapping[int, np.ndarray], reported: float
) -> np.ndarray | None:
    found = _statistic_of(name)
    if found is None or found[1] not in kinds:
        return None
    statistic, samples = _statistic(found[0]), kinds[found[1]]
    if not np.isclose(statistic(samples.values, np.ones_like(samples.values)), reported, rtol=AGREEMENT):
        return None
    weights = drawn[samples.num_owners]
    return np.array([statistic(samples.values, row[samples.owners]) for row in weights])


def _statistic_of(name: str) -> tuple[str, str] | None:
    if name.startswith("percentiles."):
        return "p" + name.removeprefix("percentiles."), "latency"
    name = {"avg_latency": "mean_latency"}.get(name, name)
    match = _STATISTIC.match(name)
    return (match[1], match[2]) if match else None


def _average(values: np.ndarray, weights: np.ndarray) -> float:
    total = weights.sum()
    return float(values @ weights / total) if total else float("nan")


def _deviation(values: np.ndarray, weights: np.ndarray) -> float:
    return _average((values - _average(values, weights)) ** 2, weights) ** 0.5


def _statistic(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
    if name in ("mean", "std"):
        return _average if name == "mean" else _deviation
    share = 0.5 if name == "median" else float(name[1:]) / 100

    def quantile(values: np.ndarray, weights: np.ndarray) -> float:
        reached = np.cumsum(weights)
        if not reached[-1]:
            return float("nan")
        place = (reached[-1] - 1) * share
        low, high = np.searchsorted(reached, [np.floor(place), np.ceil(place)], side="right")
        return float(values[low] + (values[high] - values[low]) * (place - np.floor(place)))

    return quantile


def _bootstrap(a: np.ndarray | None, b: np.ndarray | None, confidence: float) -> tuple[tuple[float, float] | None, str]:
    if a is None or b is None:
        return None, _ONE_VALUE
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = b / a
    if not np.isfinite(ratios).all():
        return None, "no interval: too few values"
    low, high = np.quantile(ratios, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return (float(low), float(high)), ""
