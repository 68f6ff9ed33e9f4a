"""`/v1/embeddings`, `/pooling`, `/classify`, `/score`, `/rerank`: requests to calls, results to JSON. Pure."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jaxllm.errors import UserError
from jaxllm.pooling_params import PoolingTask
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.requests.fields import Body, flag, integer, one_of, prompts_of, text
from jaxllm_server.requests.shared_fields import TRUNCATION_SIDES, WITHOUT_EFFECT, given
from jaxllm_server.shared.options import ServerOptions

_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
}
_SHARED = WITHOUT_EFFECT | {"model", "request_id", "priority", "cache_salt", "truncate_prompt_tokens"}
_UNBUILT_OF_INPUT = {**_UNBUILT, "messages": ()}
_UNBUILT_OF_NUMBERS = {**_UNBUILT_OF_INPUT, "embed_dtype": ("float32",), "endianness": ("little", "native")}
_UNBUILT_OF_PAIRS = {
    **_UNBUILT,
    "truncation_side": ("right",),  # cuts a pair's second text at its end
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
    "max_chunks_per_doc": (),
    "instruction": (),
    "chat_template_kwargs": ({},),
    "rank_fields": (["text"],),
    "relevant_spans": (),
    "return_embeddings": (False,),
}
_OF_INPUT = {"input", "add_special_tokens", "truncation_side"}
_OF_NUMBERS = _SHARED | _UNBUILT_OF_NUMBERS.keys() | _OF_INPUT | {"encoding_format", "dimensions"}
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_DOCUMENTS_PER_UNIT = 100  # Cohere's billing unit


class PoolReply(ABC):
    """Reads a request and builds its answer."""

    id_prefix: str
    list_name = "data"
    names: Mapping[str, str]  # as in `Reply`
    fields: Collection[str]
    unbuilt: Mapping[str, tuple[Any, ...]]

    def __init__(self, fields: Body, request_id: str, **call_fields: Any) -> None:
        own_id = text(fields, "request_id")
        self.request_id = request_id if own_id is None else own_id
        self.calls: Sequence[PoolCall] = [
            PoolCall(
                model=text(fields, "model") or "",
                request_id=self.request_id,
                priority=integer(fields, "priority", 0),
                cache_salt=text(fields, "cache_salt"),
                truncate_prompt_tokens=fields.get("truncate_prompt_tokens"),
                truncation_side=one_of(fields, "truncation_side", TRUNCATION_SIDES) or "right",
                use_activation=fields.get("use_activation"),
                **call_fields,
            )
        ]

    def _given(self, body: Body, options: ServerOptions) -> dict[str, Any]:
        self.ignored: list[str] = []
        return given(body, self.fields, self.unbuilt, options.unknown_fields, self.ignored)

    def items(self, results: Sequence[PoolResult], labels: Sequence[str]) -> Iterator[str]:
        return (self._item(result, labels) for result in results)

    def tail(self, results: Sequence[PoolResult]) -> dict[str, Any]:
        num_tokens = sum(result.prompt_tokens for result in results)
        return {"usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}

    @abstractmethod
    def _item(self, result: PoolResult, labels: Sequence[str]) -> str: ...


class EmbeddingReply(PoolReply):
    """Handles `/v1/embeddings`."""

    id_prefix = "embd-"
    names: Mapping[str, str] = {"inputs": "input", "prompt": "input"}
    fields = _OF_NUMBERS | {"normalize"}
    unbuilt = _UNBUILT_OF_NUMBERS
    _object, _key = "embedding", "embedding"

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        fields = self._given(body, options)
        form = text(fields, "encoding_format") or "float"
        if form not in _FORMS:
            raise UserError(f"encoding_format must be {' or '.join(_FORMS)}, got {form[:64]!r}.", "encoding_format")
        self._write = _FORMS[form]
        super().__init__(
            fields,
            request_id,
            task=self._task(fields),
            inputs=prompts_of(fields, "input", options.max_pooling_inputs),
            add_special_tokens=flag(fields, "add_special_tokens", True),
            dimensions=fields.get("dimensions"),
            normalize=fields.get("normalize"),
        )

    def _task(self, fields: Body) -> PoolingTask | None:
        return "embed"

    def _item(self, result: PoolResult, labels: Sequence[str]) -> str:
        return f'{{"index":{result.index},"object":"{self._object}","{self._key}":{self._write(result.values)}}}'


class PoolingReply(EmbeddingReply):
    """Handles `/pooling`, for the request's or model's task."""

    id_prefix = "pool-"
    fields = _OF_NUMBERS | {"normalize", "use_activation", "task"}
    _object, _key = "pooling", "data"

    def _task(self, fields: Body) -> PoolingTask | None:
        task: Any = text(fields, "task")
        if task is not None and task not in get_args(PoolingTask):
            raise UserError(f"task must be one of {', '.join(get_args(PoolingTask))}, got {task[:64]!r}.", "task")
        return task


class ClassifyReply(PoolReply):
    """Handles `/classify`."""

    id_prefix = "classify-"
    names = EmbeddingReply.names
    fields = _SHARED | _UNBUILT_OF_INPUT.keys() | _OF_INPUT | {"use_activation"}
    unbuilt = _UNBUILT_OF_INPUT

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        fields = self._given(body, options)
        super().__init__(
            fields,
            request_id,
            task="classify",
            inputs=prompts_of(fields, "input", options.max_pooling_inputs),
            add_special_tokens=flag(fields, "add_special_tokens", True),
        )

    def _item(self, result: PoolResult, labels: Sequence[str]) -> str:
        label, probs = json.dumps(labels[int(result.values.argmax())]), numbers_text(result.values)
        return f'{{"index":{result.index},"label":{label},"probs":{probs},"num_classes":{len(result.values)}}}'


class ScoreReply(PoolReply):
    """Handles `/score`: one text with each of others, or two lists pairwise."""

    id_prefix = "score-"
    fields = _SHARED | _UNBUILT_OF_PAIRS.keys() | {name for pair in _SIDES for name in pair} | {"use_activation"}
    unbuilt = _UNBUILT_OF_PAIRS

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        sides = {name for pair in _SIDES for name in pair}
        fields = self._given(body, options)
        found = [pair for pair in _SIDES if sides & fields.keys() == set(pair)]
        if not found:
            raise UserError("Give text_1 and text_2, or queries and documents.", "text_1")
        ((first_name, second_name),) = found
        firsts, seconds = (_texts(fields, name, options.max_pooling_inputs) for name in (first_name, second_name))
        if len(firsts) == 1:
            firsts *= len(seconds)
        if len(firsts) != len(seconds):
            raise UserError(f"{first_name} must hold one text, or as many as {second_name}.", first_name)
        self.names = {"inputs": first_name, "prompt": first_name, "pairs": second_name}
        super().__init__(fields, request_id, task="score", inputs=firsts, pairs=seconds)

    def _item(self, result: PoolResult, labels: Sequence[str]) -> str:
        return f'{{"index":{result.index},"object":"score","score":{float(result.values[0]):.9g}}}'


class RerankReply(PoolReply):
    """Handles `/rerank`: sorts documents by relevance."""

    id_prefix = "rerank-"
    list_name = "results"
    names: Mapping[str, str] = {"inputs": "query", "prompt": "query", "pairs": "documents"}
    fields = (
        _SHARED
        | _UNBUILT_OF_PAIRS.keys()
        | {
            *("query", "documents", "top_n", "return_documents", "use_activation"),
        }
    )
    unbuilt = _UNBUILT_OF_PAIRS

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        fields = self._given(body, options)
        queries = _texts(fields, "query", 1)
        self._documents = _texts(fields, "documents", options.max_pooling_inputs)
        self._returns_documents = flag(fields, "return_documents", True)
        self._top = integer(fields, "top_n", 0)
        if self._top < 0:
            raise UserError("top_n must be at least 0; 0: all documents.", "top_n")
        inputs = queries * len(self._documents)
        super().__init__(fields, request_id, task="score", inputs=inputs, pairs=self._documents)

    def items(self, results: Sequence[PoolResult], labels: Sequence[str]) -> Iterator[str]:
        ranked = sorted(results, key=lambda result: -result.values[0])
        return super().items(ranked[: self._top or None], labels)

    def tail(self, results: Sequence[PoolResult]) -> dict[str, Any]:
        billed = {"search_units": -(-len(results) // _DOCUMENTS_PER_UNIT)}
        return super().tail(results) | {"meta": {"api_version": {"version": "2"}, "billed_units": billed}}

    def _item(self, result: PoolResult, labels: Sequence[str]) -> str:
        document = json.dumps(self._documents[result.index]) if self._returns_documents else None
        shown = "" if document is None else f'"document":{{"text":{document}}},'
        return f'{{"index":{result.index},{shown}"relevance_score":{float(result.values[0]):.9g}}}'


def _texts(fields: Body, name: str, most: int) -> list[str]:
    """Accept a text or up to `most`; each may be {"text": …}."""
    value = fields.get(name)
    texts: list[Any] = value if isinstance(value, list) else [value]
    if len(texts) > most:
        raise UserError(f"{name} may hold at most {most} texts, got {len(texts)}.", name)
    texts = [each["text"] if isinstance(each, dict) and each.keys() == {"text"} else each for each in texts]
    if set(map(type, texts)) != {str}:
        raise UserError(f"{name} must be a string{'' if most == 1 else ', or a list of strings'}.", name)
    return texts


def numbers_text(values: np.ndarray) -> str:
    """Format with nine digits, in a third of json's time."""
    return f"[{','.join(['%.9g'] * len(values)) % tuple(values.tolist())}]"


def _base64(values: np.ndarray) -> str:
    return f'"{base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")}"'


_FORMS: Mapping[str, Callable[[np.ndarray], str]] = {"float": numbers_text, "base64": _base64}
REPLIES: Mapping[str, type[EmbeddingReply | ClassifyReply | ScoreReply | RerankReply]] = {
    "/v1/embeddings": EmbeddingReply,
    "/pooling": PoolingReply,
    "/classify": ClassifyReply,
    **dict.fromkeys(("/score", "/v1/score"), ScoreReply),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RerankReply),
}
