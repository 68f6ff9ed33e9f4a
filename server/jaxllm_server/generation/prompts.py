"""Converts prompts to token ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxllm import combinations
from jaxllm.engine.async_llm import LONG_TEXT
from jaxllm.engine.engine_client import EngineClient
from jaxllm.engine.input_processor import num_kept, text_to_encode
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import checked_ids
from jaxllm.errors import UserError, too_long
from jaxllm.media.messages import take_images, with_images
from jaxllm.media.processor import Prepared
from jaxllm.media.sources import Sources
from jaxllm.media.video_messages import take_videos, with_videos
from jaxllm.media.videos import PreparedVideo
from jaxllm.sampling_params import SamplingParams
from jaxllm.text import fill_in_middle
from jaxllm.text.tokenizer import Tokenizer
from jaxllm_server.generation.calls import Call
from jaxllm_server.generation.chat_checks import (
    check_messages,
    check_template_kwargs,
    check_tools,
    texts_of,
    with_read_arguments,
)
from jaxllm_server.shared.options import ServerOptions
from jaxllm_server.shared.truncation import cut_ids

_NO_TEMPLATE = (
    "This model has no chat template: send a text instead of messages (/v1/completions, over gRPC `text`), or start "
    "the server with --chat-template."
)
LEFT_OUT = 4  # in contexts: templates may omit parts


class Prompts:
    """Builds a model's prompts; `off_loop` runs slow work outside the event loop."""

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        template: str | None,
        template_kwargs: Mapping[str, Any],
        off_loop: Callable[..., Awaitable[Any]],
    ) -> None:
        self._engine = engine
        self._options = options
        self._template = template
        self._template_kwargs = template_kwargs
        self._off_loop = off_loop
        config = engine.config
        self._sources = Sources(config.allowed_media_domains, config.allowed_local_media_path)

    async def prompt_of(
        self, call: Call, params: SamplingParams | None = None, model: ModelInfo | None = None
    ) -> dict[str, Any]:
        """Return a call's token ids, and its text if available, for the engine.

        A prompt too long for the context is refused before tokenization, or truncated if `params` allow it. `model` is
        the adapter's.
        """
        model = self._engine.model if model is None else model
        if model.sources is None:
            return await self._read(call, params, model)
        if params is not None and params.truncate_prompt_tokens is not None:
            raise combinations.refusal("truncate_prompt_tokens", combinations.SEQ2SEQ)
        return model.sources.mapping(await self._read(call, params, model))

    async def _read(self, call: Call, params: SamplingParams | None, model: ModelInfo) -> dict[str, Any]:
        tokenizer = model.tokenizer
        if (call.prompt is None) == (call.messages is None):
            raise UserError("A request has either a prompt or messages.", "prompt")
        longest = self._engine.model.max_model_len
        kept = None if params is None else num_kept(params, longest)
        if call.messages is not None and call.written_ids is not None:
            if call.tools is not None:
                check_tools(call.tools, self._options.max_tools)
            ids = cut_ids(call.written_ids, kept, call.truncation_side)
            if len(ids) >= longest:
                raise too_long(longest, len(ids), None)
            return {"prompt_token_ids": checked_ids(ids, model.vocab_size)}
        if call.messages is not None:
            if self._template is None and not tokenizer.has_chat_template:
                raise UserError(_NO_TEMPLATE, "messages")
            if call.tools is not None:
                check_tools(call.tools, self._options.max_tools)
            check_template_kwargs(call.template_kwargs)
            most = LEFT_OUT * longest + 4096
            check_messages(call.messages, longest, most)
            given, language = (self._encode_chat, call, most, model), tokenizer.confined
            text, ids, images, videos = await self._off_loop(call.client, *given, language=language)
            if (images or videos) and kept is not None:
                raise combinations.refusal("truncate_prompt_tokens", "multi_modal_data")
            if call.truncation_side == "right" and kept is not None and len(ids) > kept:
                return {"prompt_token_ids": ids[:kept]}  # the text would not match
            prompt = with_images({"prompt": text, "prompt_token_ids": ids}, images, model.processor)
            return with_videos(prompt, videos, model.processor, tokenizer)
        if not isinstance(call.prompt, str) and call.suffix is None:
            return {"prompt_token_ids": cut_ids(call.prompt or (), kept, call.truncation_side)}
        text, ids = await self._encode_text(call, params or SamplingParams(), tokenizer)
        return {"prompt": text, "prompt_token_ids": ids}

    async def _encode_text(self, call: Call, params: SamplingParams, tokenizer: Tokenizer) -> tuple[str, Sequence[int]]:
        add, longest = call.add_special_tokens is not False, self._engine.model.max_model_len
        kept, before = num_kept(params, longest), call.prompt if isinstance(call.prompt, str) else ""
        if call.suffix is not None:
            text = before + call.suffix
            tokenizer.check_length(text, longest)
            encode = partial(fill_in_middle.encode, tokenizer, call.prompt or "", call.suffix, add)
        elif kept is not None and call.truncation_side == "right":
            text = before
            encode = partial(_encode_beginning, tokenizer, text, kept, add)
        else:
            text = text_to_encode(before, params, tokenizer, longest)
            encode = partial(tokenizer.encode, text, add)
        if len(text) <= LONG_TEXT and tokenizer.confined is None:
            return text, encode()
        return text, await self._off_loop(call.client, encode, language=tokenizer.confined)

    def _encode_chat(
        self, call: Call, most: int, model: ModelInfo
    ) -> tuple[str, list[int], list[Prepared], list[PreparedVideo]]:
        """Return text and token ids, up to `most`, images and videos; slow.

        Omitted texts count too: an ignored key of 1,300,000 empty lists took 16 s to copy and search.
        """
        tokenizer, config, processor = model.tokenizer, self._engine.config, model.processor
        given, options = call.messages or (), call.mm_processor_kwargs
        given, videos = take_videos(given, processor, self._sources, config.most_videos, options)
        most_images = 0 if processor is None else config.most_media(processor.kind)
        given, images = take_images(given, processor, self._sources, most_images, videos)
        tools = call.tools if call.tool_choice != "none" else None
        shape = tokenizer.template_shape(self._template, tools)
        messages = with_read_arguments(given, shape, self._options.max_json_depth)
        tokenizer.check_length("".join(texts_of([messages, tools])), self._engine.model.max_model_len, most)
        text, ids = tokenizer.encode_chat(
            messages,
            add_generation_prompt=call.add_generation_prompt,
            continue_final_message=call.continue_final_message,
            tools=tools,
            chat_template=self._template,
            chat_template_kwargs={**self._template_kwargs, **call.template_kwargs},
            add_special_tokens=bool(call.add_special_tokens),
            read_arguments=None,
            image_marks=model.image_marks if images else None,
        )
        return text, ids, images, videos


def _encode_beginning(tokenizer: Tokenizer, text: str, most: int, add_special_tokens: bool) -> list[int]:
    return tokenizer.encode(tokenizer.beginning_of(text, most), add_special_tokens)[:most]
