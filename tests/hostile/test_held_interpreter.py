"""No pass over a body with millions of token ids holds the interpreter, in which the event loop waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm_server.access.ledger import size_of
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.generate import GenerateReply
from jaxllm_server.openai.tokens import detokenize_request_of
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.options import ServerOptions

pytestmark = pytest.mark.ci
NUM_IDS = 4_000_000
MOST_SECONDS = 0.03  # the interpreter changes threads after 0.005
TRIES = 5  # the least of them is used
IDS = [7] * NUM_IDS
REPLIES = {
    "completions": lambda: CompletionReply({"prompt": IDS}, ServerOptions(), "a"),
    "several prompts": lambda: CompletionReply({"prompt": [IDS]}, ServerOptions(), "a"),
    "chats": lambda: ChatReply({"prompt_token_ids": IDS}, ServerOptions(), "a"),
    "generate": lambda: GenerateReply({"token_ids": IDS, "sampling_params": {}}, ServerOptions(), "a"),
    "detokenize": lambda: detokenize_request_of({"tokens": IDS}),
    "size": lambda: size_of({"prompt": IDS}),
    "parser": lambda: strict_json.read(b'{"prompt":[' + b"7," * (NUM_IDS - 1) + b"7]}", 64, in_thread=True),
}


def held(work: Callable[[], Any]) -> float:
    """Return the longest processor time of a thread with `work` between two turns of this one."""
    begun, done, read, longest, last = threading.Event(), threading.Event(), threading.Event(), 0.0, 0.0

    def run() -> None:
        begun.set()
        work()
        done.set()
        read.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    while True:
        is_last, now = done.is_set(), time.clock_gettime(clock)
        longest, last = max(longest, now - last), now
        if is_last:
            break
        time.sleep(0.0005)
    read.set()
    thread.join()
    return longest


@pytest.mark.parametrize("name", REPLIES)
def test_ids_do_not_hold_the_interpreter(name: str) -> None:
    seconds = []
    for _ in range(TRIES):
        seconds.append(held(REPLIES[name]))
        if seconds[-1] < MOST_SECONDS:
            return
    pytest.fail(f"{name}: {min(seconds):.3f} s")


def test_one_pass_over_all_of_them_is_seen() -> None:
    assert held(lambda: set(map(type, IDS * 2))) > MOST_SECONDS
