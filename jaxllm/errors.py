"""jaxllm's exceptions; `jaxllm_server/shared/error_table.py` maps them to status codes.

`UserError` and subclasses: the request is invalid, and retries fail again. `EngineError` and subclasses: the request
was valid.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

MOST_MESSAGE = 1000  # characters


class UserError(ValueError):
    """An invalid request: one line that names cause and remedy, with quoted input escaped and shortened."""

    def __init__(self, message: str, parameter: str | None = None, value: object = None) -> None:
        super().__init__(_one_line(message))
        self.parameter = parameter
        self.value = value

    def __reduce__(self) -> tuple[Callable[..., UserError], tuple[Any, ...]]:
        # BaseException would rebuild it from the message alone.
        return _rebuild, (type(self), str(self), vars(self))


class UnsupportedError(UserError):
    """A parameter that jaxllm does not support yet."""


class ContextLengthError(UserError):
    """Prompt and requested output exceed the model's context or the KV cache.

    `num_prompt_tokens` is a lower bound if the prompt was not tokenized.
    """

    def __init__(self, message: str, num_prompt_tokens: int, max_model_len: int, parameter: str = "prompt") -> None:
        super().__init__(message, parameter, None)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class NotFoundError(UserError):
    """The model is not served."""


class AdapterNotFoundError(NotFoundError):
    """The adapter is not served, or its source is missing."""


class FeatureDisabledError(UserError):
    """Not enabled in this server's configuration or build."""


class OutOfRangeError(UserError):
    """The requested data are no longer stored."""


class RequestIdInUseError(UserError):
    """Another active request has the same id."""


class EngineError(RuntimeError):
    """A failure of the engine or device, or its state."""


class EngineDeadError(EngineError):
    """The engine has stopped permanently; retry on another replica."""


class RequestFailedError(EngineError):
    """The request failed in a step; the engine continues."""


class OverloadedError(EngineError):
    """A limit on load is reached; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(EngineError):
    """The engine is loading, paused or hung; retry later."""


class DrainingError(UnavailableError):
    """The engine is shutting down; retry on another replica."""


class DeadlineError(EngineError):
    """The request exceeded its time limit."""


class SlowConsumerError(EngineError):
    """The client stopped reading its stream."""


def too_long(
    max_model_len: int, num_prompt: int, num_output: int | None, *, is_bound: bool = False
) -> ContextLengthError:
    """Return the error for a too long prompt or output; proxies match its first words."""
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
    return DeadlineError(f"The request was not through after {seconds:g} seconds.")


def printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _one_line(message: str) -> str:
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
    """Return whether memory, descriptors, processes or threads are exhausted: a retry may succeed."""
    if isinstance(error, OSError):
        return error.errno in _EXHAUSTED
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OF_EXHAUSTION)


_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC}
_OF_EXHAUSTION = ("RESOURCE_EXHAUSTED", "can't start new thread")
