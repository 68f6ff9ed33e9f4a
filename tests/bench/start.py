"""How long a newcomer waits: from `python` to the first token of the embedded model, `python -m tests.bench.start`.

Cold: an empty cache of compiled programs. Second start: the programs of the first one. Each in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import sys, time
from jaxllm import LLM, SamplingParams
llm = LLM()
ready = time.time()
llm.engine.add_request("0", "Once upon a time", SamplingParams(temperature=0.0, max_tokens=8))
while not llm.engine.step():
    pass
print(ready, time.time())
llm.close()
"""
PROMISED = {"cold": 15.0, "second": 6.0}


def main() -> None:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, promised in PROMISED.items():
            start = time.time()
            output = subprocess.run(
                [sys.executable, "-c", PROGRAM],
                env={"JAXLLM_CACHE_DIR": folder, "JAX_PLATFORMS": "cpu", "PATH": ""},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            ready, first = (float(word) - start for word in output.split())
            figures[name] = {"ready_s": ready, "first_token_s": first}
            print(
                f"{name:>7} start: ready {ready:5.1f} s, first token {first:5.1f} s (promised: under {promised:.0f} s)"
            )
    print(json.dumps({"start": figures}))


if __name__ == "__main__":
    main()
