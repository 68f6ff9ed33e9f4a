"""Draw request times of a benchmark, as vLLM's `get_request` (vllm/benchmarks/serve.py)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from jaxllm.errors import UserError

RampUp = Literal["linear", "exponential"]


def arrival_times(num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> np.ndarray:
    """Draw ascending arrival times, float64 `[num_requests]`, at `rate` per second.

    Gaps are Gamma distributed with shape `burstiness` and mean 1 / rate (1: a Poisson process, infinity: even), scaled
    to end at num_requests / rate. With an infinite rate, all are 0.
    """
    _check(rate, burstiness)
    times = np.cumsum(_gaps(np.full(num_requests, rate), burstiness, seed))
    if num_requests and times[-1] > 0:
        times *= num_requests / rate / times[-1]
    return times


def ramped_times(
    num_requests: int, start_rate: float, end_rate: float, strategy: RampUp, burstiness: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Draw arrival times, float64 `[num_requests]`, as the rate changes from `start_rate` to `end_rate`.

    Rates interpolate by request, linearly or exponentially; times are not scaled.
    """
    _check(end_rate, burstiness)
    least = 0.0 if strategy == "linear" else math.ulp(0.0)
    if not least <= start_rate <= end_rate < math.inf:
        above = "at least" if strategy == "linear" else "above"
        raise UserError(
            f"a {strategy} ramp needs a start {above} 0 and a finite end not below it, got {start_rate} to {end_rate}."
        )
    progress = np.arange(num_requests) / max(num_requests, 1)
    if strategy == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
        if start_rate == 0.0 and num_requests:
            # At rate 0 it would never arrive.
            rates[0] = end_rate / num_requests
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return np.cumsum(_gaps(rates, burstiness, seed))


def _gaps(rates: np.ndarray, burstiness: float, seed: int) -> np.ndarray:
    means = 1.0 / rates
    if math.isinf(burstiness):
        return means
    return np.random.default_rng(seed).gamma(burstiness, means / burstiness)


def _check(rate: float, burstiness: float) -> None:
    for name, value in (("the request rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise UserError(f"{name} must be above 0, got {value}.")
