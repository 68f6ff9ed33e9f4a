"""`LLM`: offline generation for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.engine_client import SteppedEngine
from jaxllm.engine.features.pooling.prompts import check_kind
from jaxllm.engine.features.weights.offline import OfflineWeightCalls
from jaxllm.engine.prompts import Prompt
from jaxllm.engine.ranks import engine_type
from jaxllm.errors import EngineError, UserError
from jaxllm.fleet.offline import FleetEngine
from jaxllm.lora_request import LoRARequest
from jaxllm.media.messages import take_images, with_images
from jaxllm.media.sources import Sources
from jaxllm.media.video_messages import take_videos, with_videos
from jaxllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    pooled_as,
    pooled_output,
)
from jaxllm.pooling_params import PoolingParams, PoolingTask
from jaxllm.request_params import RequestParams
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
_NO_WORKERS = "there are no workers; `llm.engine` is the engine, in this process"
_NO_QUEUE = "use `llm.engine` (add_request, step)"
_MISSING = {  # attributes of vLLM's `LLM`
    "reward": "use `llm.classify(prompts, pooling_params=PoolingParams(use_activation=False))`",
    **dict.fromkeys(("collective_rpc", "apply_model", "get_world_size"), _NO_WORKERS),
    **dict.fromkeys(("start_profile", "stop_profile"), "use `llm.engine.start_profile(folder, num_steps)`"),
    **dict.fromkeys(("enqueue", "wait_for_completion"), _NO_QUEUE),
    "get_metrics": "`llm.engine.metrics` counts",
    "llm_engine": "it is `llm.engine`",
    "reset_mm_cache": "`llm.reset_prefix_cache()` also forgets encoded images and sounds",
    "set_tokenizer": "give tokenizer=… to LLM",
}


class NotBuiltError(AttributeError):
    """An attribute of vLLM's `LLM` that jaxllm lacks; `hasattr` returns False for it."""


class LLM(OfflineWeightCalls):
    """A loaded model, by default the small one included in jaxllm.

    Keyword arguments are the fields of `EngineConfig`.

        with LLM("path/or/hub-id", dtype="bfloat16") as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)
    """

    def __init__(self, model: str | EngineConfig | None = None, *, use_tqdm: bool = False, **engine_args: Any) -> None:
        config = config_of(model, engine_args)
        self.engine: SteppedEngine
        if config.is_fleet:
            self.engine = FleetEngine(config)
        else:
            self.engine = engine_type(config).from_engine_args(config, progress=use_tqdm)
        self._num_requests = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """Return an `LLM` with these `EngineArgs`."""
        return cls(engine_args)

    if not TYPE_CHECKING:  # any name would pass

        def __getattr__(self, name: str) -> NoReturn:
            if name in _MISSING:
                raise NotBuiltError(f"jaxllm's LLM has no {name}: {_MISSING[name]}.", name=name, obj=self)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        kv_transfer_params: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; return outputs in order.

        A prompt is text, token ids, or a mapping (see `LLMEngine.add_request`). Parameters and adapters are one for all
        or one each; the model has default parameters. `kv_transfer_params` are one each. If one prompt is refused, none
        runs.
        """
        items = _as_list(prompts)
        params = self._params_for(len(items), sampling_params)
        if priority is not None:
            _check_lengths("priority", len(items), len(priority))
        final = [
            replace(own, output_kind=RequestOutputKind.FINAL_ONLY) if isinstance(own, SamplingParams) else own
            for own in params
        ]
        if kv_transfer_params is not None:
            _check_lengths("kv_transfer_params", len(items), len(kv_transfer_params))
        adapters = _each(len(items), lora_request)
        return self._complete(items, final, use_tqdm, priority, adapters=adapters, transfers=kv_transfer_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, with the chat template of the model or adapter."""
        self._check_generates()
        if not messages:
            raise UserError("A conversation needs at least one message.", "messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        adapters = _each(len(conversations), lora_request)
        prompts = [
            self.chat_prompt(
                conversation,
                lora_request=adapter,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
            )
            for conversation, adapter in zip(conversations, adapters, strict=True)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=adapters)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        lora_request: LoRARequest | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **template_args: Any,
    ) -> dict[str, Any]:
        """Render a conversation as a prompt with token ids and media.

        `mm_processor_kwargs` choose frames of videos; others as in `Tokenizer.encode_chat`.
        """
        model, config = self.engine.model_of(lora_request), self.engine.config
        sources = Sources(config.allowed_media_domains, config.allowed_local_media_path)
        options = mm_processor_kwargs or {}
        messages, videos = take_videos(messages, model.processor, sources, config.most_videos, options)
        most = 0 if model.processor is None else config.most_media(model.processor.kind)
        messages, images = take_images(messages, model.processor, sources, most, videos)
        marks = {"image_marks": model.image_marks} if images else {}
        text, ids = model.tokenizer.encode_chat(messages, **marks, **template_args)
        prompt = with_images({"prompt": text, "prompt_token_ids": ids}, images, model.processor)
        return with_videos(prompt, videos, model.processor, model.tokenizer)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return each prompt's likeliest continuations, as transformers' `num_beams`; see `BeamSearchParams`."""
        if not isinstance(params, BeamSearchParams):
            message = f"Parameters of a beam search are a BeamSearchParams, not {type(params).__name__}."
            raise UserError(message, "params")
        items = _as_list(prompts)
        adapters = _each(len(items), lora_request)
        outputs = self._complete(items, [params] * len(items), use_tqdm, adapters=adapters)
        found = []
        for index, (output, adapter) in enumerate(zip(outputs, adapters, strict=True)):
            if output.outputs[0].finish_reason == "error":
                raise EngineError(f"Prompt {index} failed: {output.outputs[0].stop_reason}.")
            has_text = not self.engine.config.skip_tokenizer_init
            tokenizer = self.engine.model_of(adapter).tokenizer if has_text else None
            found.append(_beam_search_output(output, tokenizer, params.include_stop_str_in_output))
        return found

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return each prompt's embedding, in order."""
        pooled = self.encode(prompts, pooling_params, pooling_task="embed", use_tqdm=use_tqdm)
        return [pooled_as(each, EmbeddingOutput(each.outputs.data.tolist())) for each in pooled]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return a classifier's number per label for each prompt."""
        pooled = self.encode(prompts, pooling_params, pooling_task="classify", use_tqdm=use_tqdm)
        return [pooled_as(each, ClassificationOutput(each.outputs.data.tolist())) for each in pooled]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return the similarity of texts: one to one, one to many, or pairwise.

        A cross-encoder reads both texts of a pair; otherwise it is their embeddings' cosine.
        """
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second) or not all(isinstance(text, str) for text in (*first, *second)):
            message = f"score takes two texts, one and many, or as many as others; got {len(first)} and {len(second)}."
            raise UserError(message, "data_2")
        model = self.engine.model
        if model.tasks == ("embed",):
            texts = list(dict.fromkeys((*first, *second)))
            params = replace(pooling_params or PoolingParams(), normalize=True)
            embedded = self.encode(texts, params, pooling_task="embed", use_tqdm=use_tqdm)
            of = dict(zip(texts, embedded, strict=True))
            return [
                replace(
                    pooled_as(of[left], ScoringOutput(float(of[left].outputs.data @ of[right].outputs.data))),
                    prompt_token_ids=(*of[left].prompt_token_ids, *of[right].prompt_token_ids),
                )
                for left, right in zip(first, second, strict=True)
            ]
        most = None if pooling_params is None else pooling_params.truncate_prompt_tokens
        most = model.max_model_len if most == -1 else most
        pairs = [model.pair(left, right, most) for left, right in zip(first, second, strict=True)]
        pooled = self.encode(pairs, pooling_params, pooling_task="score", use_tqdm=use_tqdm)
        return [pooled_as(each, ScoringOutput(float(each.outputs.data[0]))) for each in pooled]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Pool each prompt for a task; `outputs.data` is a numpy array. If one prompt is refused, none runs."""
        items = _as_list(prompts)
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            params = [replace(pooling_params or PoolingParams(), task=pooling_task)] * len(items)
        else:
            params = [replace(_pooling_params(own), task=pooling_task) for own in pooling_params]
            _check_lengths("pooling_params", len(items), len(params))
        # Similar lengths run together: a step is padded to its longest.
        outputs = [pooled_output(output) for output in self._complete(items, params, use_tqdm, sorts=True)]
        for index, output in enumerate(outputs):
            if output.outputs.finish_reason == "error":
                raise EngineError(f"Prompt {index} failed: {output.outputs.stop_reason}.")
        return outputs

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer:
        """Return the model's tokenizer, or the adapter's."""
        return self.engine.model_of(lora_request).tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters: the model's generation_config.json, else neutral."""
        self._check_generates()
        return self.engine.model.default_params

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; return False, without clearing, while requests run."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model's memory."""
        self.engine.close()

    def _check_generates(self) -> None:
        check_kind(None, self.engine.model, self.engine.config.model)

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.engine.model.default_params] * count
        _check_lengths("sampling_params", count, len(given))
        return given

    def _complete(
        self,
        items: Sequence[Prompt],
        params: Sequence[RequestParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
        sorts: bool = False,
        adapters: Sequence[LoRARequest | None] | None = None,
        transfers: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[RequestOutput]:
        """Run requests; return outputs in the order of `items`.

        `sorts` schedules the longest prompts first.
        """
        self._check_runs()
        accepted = []
        for index, (prompt, prompt_params) in enumerate(zip(items, params, strict=True)):
            rank = 0 if priority is None else priority[index]
            adapter = None if adapters is None else adapters[index]
            name = str(self._num_requests + index)
            transfer = None if transfers is None else transfers[index]
            options = {"lora_request": adapter, "kv_transfer_params": transfer}
            accepted.append(self.engine.accept(name, prompt, prompt_params, rank, **options))
        self._num_requests += len(items)
        ids = [request.request_id for request in accepted]
        if sorts:
            accepted.sort(key=lambda request: -len(request.prompt_token_ids))
        self.engine.add(accepted)
        try:
            return self._run(ids, use_tqdm)
        finally:
            for request_id in ids:
                self.engine.abort_request(request_id)

    def _run(self, ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        num_in = num_out = 0
        is_silent = not (use_tqdm and ids)
        with tqdm(total=len(ids), desc="Processed prompts", disable=is_silent, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    done[output.request_id] = output
                    num_in += len(output.prompt_token_ids)
                    num_out += sum(len(completion.token_ids) for completion in output.outputs)
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    made = f", output: {num_out / seconds:.2f} toks/s" if num_out else ""
                    bar.postfix = f"est. speed input: {num_in / seconds:.2f} toks/s{made}"
                    bar.update()
        return [done[request_id] for request_id in ids]


def _beam_search_output(output: RequestOutput, tokenizer: Tokenizer | None, shows_stop: bool) -> BeamSearchOutput:
    """Convert to vLLM's form, with the prompt."""
    sequences = []
    for beam in output.outputs:
        assert beam.score is not None and beam.cumulative_logprob is not None
        is_cut = beam.finish_reason == "stop" and not shows_stop
        tokens = [*output.prompt_token_ids, *beam.token_ids[: len(beam.token_ids) - is_cut]]
        text = "" if tokenizer is None else tokenizer.decode(tokens, False)
        sequences.append(BeamSearchSequence(tokens, text, beam.cumulative_logprob, beam.score, beam.finish_reason))
    return BeamSearchOutput(sequences)


def _each(count: int, given: LoRARequest | Sequence[LoRARequest | None] | None) -> Sequence[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    _check_lengths("lora_request", count, len(given))
    return given


def _check_lengths(name: str, num_prompts: int, count: int) -> None:
    if count != num_prompts:
        raise UserError(f"The lengths of prompts ({num_prompts}) and {name} ({count}) must be the same.", name)


def _pooling_params(given: Any) -> PoolingParams:
    if not isinstance(given, PoolingParams):
        raise UserError(f"Pooling parameters are a PoolingParams, not {type(given).__name__}.", "pooling_params")
    return given


def _as_list(prompts: Any) -> list[Prompt]:
    """Return prompts as a list; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(f"A prompt must be text or a list of token ids, got {type(prompts).__name__}.", "prompts")
    items = list(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items
