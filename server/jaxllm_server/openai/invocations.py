"""`/invocations`, SageMaker's route: selects a route by body and tasks, in vLLM's order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.errors import UserError
from jaxllm_server.requests.fields import Body


def route_of(body: Body, tasks: Sequence[str]) -> str:
    """Return the route for a body, given the model's tasks.

    >>> route_of({"messages": []}, ["generate"]), route_of({"input": "a"}, ["classify"])
    ('/v1/chat/completions', '/classify')

    Raises:
        UserError: if no route matches.
    """
    body = {name: value for name, value in body.items() if value is not None}
    if "messages" in body:
        return "/v1/chat/completions"
    if "prompt" in body:
        return "/v1/completions"
    if "task" in body:
        return "/pooling"
    if "input" in body:
        return next((path for task, path in _OF_INPUT if task in tasks), "/pooling")
    if "query" in body:
        return "/rerank"
    if body.keys() & {"text_1", "queries", "data_1"}:
        return "/score"
    raise UserError("The body matches no API: give messages, prompt, input, query, or text_1 and text_2.", "messages")


_OF_INPUT = (("embed", "/v1/embeddings"), ("classify", "/classify"))
