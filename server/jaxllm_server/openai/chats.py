"""`/v1/chat/completions/batch`: several conversations, each a call and a choice, as in vLLM. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.errors import UserError
from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import check_fan_out, numbered
from jaxllm_server.openai.conversation import messages_of
from jaxllm_server.openai.replies import usage_fields
from jaxllm_server.requests.fields import Body
from jaxllm_server.shared.options import ServerOptions

# vLLM's limits. `prompt_token_ids` could not differ.
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    **ChatReply.unbuilt,
    "n": (1,),
    "stream": (False,),
    "stream_options": (),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "prompt_token_ids": (),
    "kv_transfer_params": ({},),
}


class ChatsReply(ChatReply):
    """Answers several conversations."""

    unbuilt = _UNBUILT

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        conversations = body.get("messages")
        if not isinstance(conversations, list) or set(map(type, conversations)) != {list}:
            message = "messages must be a list of conversations, each a list of at least one message."
            raise UserError(message, "messages")
        if len(conversations) > options.max_prompts:
            most = f"at most {options.max_prompts} conversations, got {len(conversations)}"
            raise UserError(f"messages may hold {most}.", "messages")
        check_fan_out(1, "n", len(conversations), options)
        super().__init__({**body, "messages": conversations[0]}, options, request_id)
        (call,) = self.calls
        self.calls: Sequence[Call] = [
            replace(
                call,
                messages=messages_of(conversation, f"messages[{number}]"),
                request_id=numbered(self.request_id, number, options.max_request_id_chars),
            )
            for number, conversation in enumerate(conversations)
        ]

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        choices = []
        for number, (call, chunk) in enumerate(zip(self.calls, chunks, strict=True)):
            answer = self.answer(chunk, call.messages or ())
            of_prompt = {name: answer[name] for name in ("prompt_logprobs", "prompt_token_ids")}
            choices += [{**choice, "index": number, **of_prompt} for choice in answer["choices"]]
        return {"choices": choices, "usage": usage_fields([chunk.usage for chunk in chunks], self.form)}
