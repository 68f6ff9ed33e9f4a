"""A replica whose next step hangs forever after SIGUSR1."""

import os
import signal
import time
from typing import Any

from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.fleet.node import main


def hang(*_: object) -> None:
    def never(*_: Any) -> Any:
        time.sleep(1e6)

    LLMEngine.step = never  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, hang)
    code = main()
    os._exit(code)
