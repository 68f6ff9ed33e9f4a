"""Load a model for a command, and stream its output."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxllm.commands.arguments import build, by_flags
from jaxllm.commands.constraint_flags import add_constraint_flags, constraint_of
from jaxllm.commands.flags import add_sampling_flags, given
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.lora_request import LoRARequest
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM

REQUEST_ID = "cli"


def add_request_flags(parser: argparse.ArgumentParser, max_tokens: int, skipped: Collection[str] = ()) -> None:
    parser.add_argument("--lora", metavar="PATH", help="a LoRA adapter of the model: its folder or hub id")
    add_sampling_flags(parser.add_argument_group("sampling"), max_tokens, skipped)
    add_constraint_flags(parser.add_argument_group("output format"))


def params_of(options: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    build(SamplingParams, options, max_tokens=max_tokens)
    return {"max_tokens": max_tokens, **given(options, SamplingParams), **constraint_of(options)}


def with_lora(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return engine options for `--lora`, and further arguments of requests."""
    path = options["lora"]
    if path is None:
        return options, {}
    from jaxllm.checkpoints.lora_files import highest_rank
    from jaxllm.engine.features.adapters import store

    request = LoRARequest("lora", 1, path)
    with store.naming(replace(request, lora_name=path)):
        rank = highest_rank(store.folder_of(request))
    own = {"EngineConfig.max_lora_rank": rank, **options, "EngineConfig.enable_lora": True}
    return own, {"lora_request": request}


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the division of memory and the phases of the start"
    )


@contextmanager
def open_llm(options: Mapping[str, Any], **defaults: Any) -> Iterator[LLM]:
    """Load the model named by flags; errors name flags. `defaults` apply to settings without one."""
    from jaxllm.llm import LLM

    if options["verbose"]:
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        logging.getLogger("jaxllm").setLevel(logging.INFO)
    try:
        settings = defaults | given(options, EngineConfig)
        loaded = LLM(options["model"], use_tqdm=sys.stderr.isatty(), **settings)
    except UserError as error:
        raise UserError(by_flags(str(error), EngineConfig, has_sampling=True)) from error
    with loaded as llm:
        yield llm


def profile(llm: LLM, options: Mapping[str, Any]) -> AbstractContextManager[None]:
    from jaxllm.runner.profiling import profiled

    return profiled(llm.engine, options["profile"], options["profile_steps"])


@contextmanager
def noting_interrupts() -> Iterator[threading.Event]:
    """Set an event on ^C; a second one interrupts a step, which costs the engine's cache."""
    seen = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield seen  # only the main thread handles signals
        return

    def note(*_: object) -> None:
        if seen.is_set():
            raise KeyboardInterrupt
        seen.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def stream(
    llm: LLM, prompt: Any, params: SamplingParams, further: Mapping[str, Any]
) -> tuple[RequestOutput | None, bool]:
    """Stream a request's text; return its last output and whether ^C ended it."""
    output, num_shown = None, 0
    with noting_interrupts() as interrupt:
        llm.engine.add_request(REQUEST_ID, prompt, params, **further)
        try:
            while llm.engine.has_unfinished_requests() and not interrupt.is_set():
                for output in llm.engine.step():
                    text = output.outputs[0].text
                    print(text[num_shown:], end="", flush=True)
                    num_shown = len(text)
        finally:
            llm.engine.abort_request(REQUEST_ID)
    return output, interrupt.is_set() and (output is None or not output.finished)
