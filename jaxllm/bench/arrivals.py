"""When requests arrive: seconds after the start, drawn before anything is sent. Reads no clock.

As in vLLM (vllm/benchmarks/serve.py, `get_request`), so that a rate means the same load.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from jaxllm.errors import UserError

RampUp = Literal["linear", "exponential"]


def arrival_times(num_requests: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> np.ndarray:
    """Draw when each of `num_requests` arrives, float64 `[num_requests]`, ascending, at `rate` a second on average.

    The time between two is Gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less
    comes in bursts, more is more even, infinity exactly even. The times are stretched so that the last one is
    num_requests / rate: two runs of a rate offer the same load. An infinite rate has all of them arrive at once.
    """
    _check(rate, burstiness)
    times = np.cumsum(_gaps(np.full(num_requests, rate), burstiness, seed))
    if num_requests and times[-1] > 0:
        times *= num_requests / rate / times[-1]
    return times


def ramped_times(
    num_requests: int, start_rate: float, end_rate: float, strategy: RampUp, burstiness: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Draw arrivals, float64 `[num_requests]`, while the rate goes from `start_rate` to `end_rate` a second.

    The rate of request i of n is start + (end - start) · i/n ("linear") or start · (end / start)^(i/n)
    ("exponential"). Nothing is stretched.
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
            # Nothing would ever arrive at rate 0: the first comes as soon as the second would.
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
