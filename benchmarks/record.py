"""The cost of `--record`: the recorder's time in a decode step of the embedded model, which has the shortest steps.

`python -m benchmarks.record`: processor time of its calls, relative to a whole step without a recorder, 64 rows.
On two cores, rounds with and without the recorder differ less than two rounds without it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.aims import require
from jaxllm import LLM, SamplingParams
from jaxllm.replay.recording import FileRecorder
from tests.support import inspection

ROWS, LIMIT = 64, 0.02


class TimedRecorder(FileRecorder):
    """Adds up the time of its calls."""

    def __init__(self, *settings: Any, **others: Any) -> None:
        super().__init__(*settings, **others)
        self.seconds = 0.0
        self.planned, self.committed = self._timed(self.planned), self._timed(self.committed)

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            began = time.thread_time()
            call(*given)
            self.seconds += time.thread_time() - began

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, LLM(max_num_seqs=ROWS, precompile="covering") as llm:
        alone, _, _ = run(llm, None, options.steps)
        for name, is_redacted in (("recorded", False), ("redacted", True)):
            recorder = TimedRecorder(Path(folder) / name, is_redacted=is_redacted)
            _, seconds, num_bytes = run(llm, recorder, options.steps)
            worst = max(worst, seconds / alone)
            print(
                f"{name}: {seconds * 1e6:.0f} us of {alone * 1e3:.2f} ms a step of {ROWS} rows: {seconds / alone:.2%} "
                f"(aim under {LIMIT:.0%}), {num_bytes:.0f} bytes a step"
            )
    require(worst < LIMIT, f"recording costs {worst:.1%}")


def run(llm: LLM, recorder: TimedRecorder | None, num_steps: int) -> tuple[float, float, float]:
    """Return the seconds of a step, those of the recorder in it, and the bytes that it wrote."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    inspection.set_recorder(engine, recorder)
    if recorder is not None:
        recorder.begin(engine.scheduler)
    whole, number, first = [], 0, 0 if recorder is None else recorder.size
    while len(whole) < num_steps:
        if not engine.has_unfinished_requests():
            for _ in range(ROWS):
                number += 1
                engine.add_request(str(number), [3 + number % 200] * 8, params)
        began = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - began)
    engine.abort_requests([(str(one), "abort") for one in range(number + 1)])
    size = 0 if recorder is None else recorder.size - first
    return statistics.median(whole), 0.0 if recorder is None else recorder.seconds / num_steps, size / num_steps


if __name__ == "__main__":
    main()
