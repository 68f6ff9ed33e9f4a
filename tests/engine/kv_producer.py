"""A producer in another process: prints a line when it is ready, then `kv_transfer_params` for each prompt it reads.

Arguments: a model's folder, and the seconds between two blocks that it sends. Lines are JSON.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import Any

from jaxllm import LLMEngine, SamplingParams
from jaxllm.engine.features.transfer import frames
from tests.engine.test_kv_transfer import KEEP, config_of, run


def main(model: str, seconds: str) -> None:
    """Compute the prompts of standard input until it ends."""
    made = frames.pack

    def slow(*given: Any) -> bytes:
        time.sleep(float(seconds))
        return made(*given)

    frames.pack = slow
    with closing(LLMEngine(config_of(model, "kv_producer"))) as engine:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            output = run(engine, json.loads(line), SamplingParams(max_tokens=1, temperature=0.0), KEEP)
            print(json.dumps(output.kv_transfer_params), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
