"""Some replicas compute prompts, others continue them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.errors import UnavailableError
from jaxllm.fleet.replica import RoutedRequest
from jaxllm.fleet.router import Router
from jaxllm.kv_transfer_config import KvTransferConfig, TransferOptions
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class Prefills:
    """The prompts being computed by the first replicas; the others are `decoders`."""

    def __init__(self, config: EngineConfig, router: Router) -> None:
        self._prefillers = range(config.prefill_replicas)
        self.decoders = range(config.prefill_replicas, config.data_parallel_size)
        self._router = router
        self._key = secrets.token_hex()  # for no other process of the machine
        self._running: dict[str, asyncio.Future[Mapping[str, Any] | None]] = {}

    def settings_of(self, number: int) -> dict[str, Any]:
        role = "kv_producer" if number in self._prefillers else "kv_consumer"
        transfer = KvTransferConfig(kv_role=role, kv_connector_extra_config=TransferOptions(api_key=self._key))
        return {"kv_transfer_config": asdict(transfer), "prefill_replicas": 0, "decode_replicas": 0}

    def begin(self, request: RoutedRequest) -> asyncio.Future[RoutedRequest | None] | None:
        """Compute a prompt; the result is the request for a decoder, None if the decoder must compute the prompt.

        Returns None if a decoder has all blocks.
        """
        given, count = request.sent, len(request.digests)
        if not isinstance(given, SamplingParams | None) or not count:
            return None
        if given is not None and (given.skip_reading_prefix_cache or given.prompt_logprobs is not None):
            return None
        found = self._router.index.matches(request.digests)
        if any(found.get(number, 0) >= count for number in self.decoders):
            return None
        return asyncio.ensure_future(self._compute(request))

    def put(self, name: str, output: RequestOutput | None) -> bool:
        """Take the output of a prompt, None for a failure; return whether `name` is one."""
        running = self._running.get(name)
        if running is None:
            return False
        if (output is None or output.finished) and not running.done():
            running.set_result(None if output is None else output.kv_transfer_params)
        return True

    async def _compute(self, request: RoutedRequest) -> RoutedRequest | None:
        name = f"prefill-{request.internal_id}"
        params = SamplingParams(max_tokens=1, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
        if request.sent is not None:
            params = replace(params, truncate_prompt_tokens=request.sent.truncate_prompt_tokens)
        computed = replace(
            request,
            internal_id=name,
            name=f"{request.name} (prefill)",
            params=params,
            sent=params,
            num_sequences=1,
            replicas=self._prefillers,
            kv_transfer_params={"do_remote_decode": True},
        )
        running = self._running[name] = asyncio.get_running_loop().create_future()
        try:
            self._router.add(computed)
            found = await running
        except UnavailableError:  # no replica for prompts
            return None
        finally:
            del self._running[name]
            self._router.leave(name)
        return None if found is None else replace(request, kv_transfer_params=found)
