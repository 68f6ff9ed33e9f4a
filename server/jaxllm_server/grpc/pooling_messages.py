"""Pooling requests and responses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxllm.errors import UserError
from jaxllm.pooling_params import PoolingTask
from jaxllm.v1 import inference_pb2, types_pb2
from jaxllm_server.grpc.reading import refuse_unknown_fields
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult

if TYPE_CHECKING:
    from jaxllm.model.head import Head

PoolRequest: TypeAlias = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.ScoreRequest
_POOLING_TASKS: Mapping[type[PoolRequest], PoolingTask] = {
    inference_pb2.EmbedRequest: "embed",
    inference_pb2.ClassifyRequest: "classify",
    inference_pb2.ScoreRequest: "score",
}


def pool_call_of(request: PoolRequest, request_id: str | None) -> PoolCall:
    refuse_unknown_fields(request)
    given = {own.name: value for own, value in request.ListFields() if own.name in PoolCall.__dataclass_fields__}
    inputs = _pairs_of(request) if isinstance(request, inference_pb2.ScoreRequest) else _input_of(request)
    return PoolCall(**{**given, **inputs, "task": _POOLING_TASKS[type(request)], "request_id": request_id})


def _input_of(request: inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest) -> dict[str, Any]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise UserError("there is no input: set one of text, token_ids.", "input")
    if kind == "text":
        return {"inputs": [request.text]}
    if request.HasField("add_special_tokens"):
        raise UserError("add_special_tokens is of a text only.", "add_special_tokens")
    return {"inputs": [request.token_ids.ids]}


def _pairs_of(request: inference_pb2.ScoreRequest) -> dict[str, Any]:
    """Return the `inputs` and `pairs` of a `PoolCall`; a single first text is repeated.

    Not copied: their number is unchecked. Raises UserError if the lengths differ.
    """
    num_first, num_second = len(request.text_1), len(request.text_2)
    if num_first not in (1, num_second):
        raise UserError(f"text_1 holds one text, or as many as text_2: got {num_first} and {num_second}.", "text_1")
    inputs = request.text_1 if num_first == num_second else [request.text_1[0]] * num_second
    return {"inputs": inputs, "pairs": request.text_2}


def embedding_of(request_id: str, model: str, result: PoolResult, index: int = 0) -> inference_pb2.EmbedResponse:
    return inference_pb2.EmbedResponse(
        request_id=request_id,
        model=model,
        values=result.values.tolist(),  # twice as fast as an array
        usage=types_pb2.Usage(prompt_tokens=result.prompt_tokens),
        index=index,
    )


def classification_of(
    request_id: str, model: str, result: PoolResult, labels: Sequence[str]
) -> inference_pb2.ClassifyResponse:
    return inference_pb2.ClassifyResponse(
        request_id=request_id,
        model=model,
        values=result.values.tolist(),
        label=labels[int(result.values.argmax())],
        usage=types_pb2.Usage(prompt_tokens=result.prompt_tokens),
    )


def scores_of(request_id: str, model: str, results: Iterable[PoolResult]) -> inference_pb2.ScoreResponse:
    ordered = sorted(results, key=lambda result: result.index)
    return inference_pb2.ScoreResponse(
        request_id=request_id,
        model=model,
        scores=[result.values[0] for result in ordered],
        usage=types_pb2.Usage(prompt_tokens=sum(result.prompt_tokens for result in ordered)),
    )


def pooling_of(pooler: Head, size: int) -> inference_pb2.Pooling:
    return inference_pb2.Pooling(
        size=size,
        takes_dimensions=pooler.dimensions is not None,
        dimensions=pooler.dimensions or (),
        labels=pooler.labels,
    )
