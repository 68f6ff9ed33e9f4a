"""What can go wrong, by whose fault it is and what the caller should do. Knows nothing of protocols.

`UserError` and what derives from it: the request is wrong and would be wrong again. `EngineError` and what derives from
it: the request was right; whether to try again is in the class. `jaxllm_server/errors.py` gives each its status codes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

MOST_MESSAGE = 1000  # characters that an error says


class UserError(ValueError):
    """The caller's fault: one line that names the thing and says what to do.

    What a message repeats of the caller's words cannot break the line, reach a terminal or a log as a control
    character, or make the message long.
    """

    def __init__(self, message: str, parameter: str | None = None, value: object = None) -> None:
        super().__init__(_one_line(message))
        self.parameter = parameter
        self.value = value

    def __reduce__(self) -> tuple[Callable[..., UserError], tuple[Any, ...]]:
        # BaseException would rebuild it from `args`, which hold the message alone.
        return _rebuild, (type(self), str(self), vars(self))


class UnsupportedError(UserError):
    """A parameter that exists elsewhere and that jaxllm does not have yet."""


class ContextLengthError(UserError):
    """The prompt, with the output that was asked for, is longer than the model's context or than the KV pool.

    `num_prompt_tokens` is the least that the prompt can have, where it was refused without being tokenized.
    """

    def __init__(self, message: str, num_prompt_tokens: int, max_model_len: int, parameter: str = "prompt") -> None:
        super().__init__(message, parameter, None)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class NotFoundError(UserError):
    """A model that is not served here."""


class AdapterNotFoundError(NotFoundError):
    """An adapter that is not served here, or not where it should be loaded from."""


class FeatureDisabledError(UserError):
    """Something that this server could do, started or built in another way."""


class OutOfRangeError(UserError):
    """What was asked for is not kept any more."""


class RequestIdInUseError(UserError):
    """A request of this id has not ended yet."""


class EngineError(RuntimeError):
    """The engine's own fault or the device's, or its state: never caused by what a caller sent."""


class EngineDeadError(EngineError):
    """The engine has stopped for good; another replica may serve the request."""


class RequestFailedError(EngineError):
    """This request failed inside a step; the engine goes on."""


class OverloadedError(EngineError):
    """The queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(EngineError):
    """New requests are refused for now: the engine is loading, paused or hung; try again later."""


class DrainingError(UnavailableError):
    """The engine is shutting down; another replica may serve the request."""


class DeadlineError(EngineError):
    """The request's time was over before it had ended."""


class SlowConsumerError(EngineError):
    """The client did not read its stream for too long."""


def too_long(
    max_model_len: int, num_prompt: int, num_output: int | None, *, is_bound: bool = False
) -> ContextLengthError:
    """Say that a prompt, with its output where that is known, is too long; proxies look for these first words.

    `is_bound`: the prompt's tokens were not counted; `num_prompt` is the least there can be.
    """
    request = f"your prompt contains {'at least ' if is_bound else ''}{num_prompt} input tokens"
    if num_output is not None:
        request = f"you requested {num_output} output tokens and {request}"
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, {request}. Shorten the prompt or "
        "ask for fewer tokens.",
        num_prompt,
        max_model_len,
        "prompt" if num_output is None or num_prompt >= max_model_len else "max_tokens",
    )


def late(seconds: float) -> DeadlineError:
    """Say that a request took longer than the server gives any."""
    return DeadlineError(f"The request was not through after {seconds:g} seconds.")


def printable(text: str) -> str:
    """Write what cannot be printed, as line ends and a terminal's escapes, as Python writes it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _one_line(message: str) -> str:
    """Write what cannot be printed as Python writes it, and leave out the middle of what is too long."""
    return _shortened(printable(_shortened(message)))


def _shortened(message: str) -> str:
    if len(message) <= MOST_MESSAGE:
        return message
    return f"{message[: MOST_MESSAGE // 2]} […] {message[-MOST_MESSAGE // 3 :]}"


def _rebuild(cls: type[UserError], message: str, attributes: dict[str, Any]) -> UserError:
    error = cls.__new__(cls, message)
    ValueError.__init__(error, message)
    vars(error).update(attributes)
    return error


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an error is for want of memory, descriptors, processes or threads, and a retry may succeed."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OF_EXHAUSTION)


_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC}
_OF_EXHAUSTION = ("RESOURCE_EXHAUSTED", "can't start new thread")  # in messages of XLA and of Python
