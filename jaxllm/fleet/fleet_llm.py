"""`FleetLLM`: several engines, each a process, with the interface of one."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jaxllm import combinations
from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.async_llm import LONG_TEXT
from jaxllm.engine.engine_client import EngineView
from jaxllm.engine.features.table import FleetCalls
from jaxllm.engine.input_processor import text_to_encode
from jaxllm.engine.kv_events import BlockBatch
from jaxllm.engine.life_cycle import EngineState
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.engine.streaming_engine import StreamingEngine, set_result
from jaxllm.errors import EngineDeadError, FeatureDisabledError, RequestFailedError, UnavailableError, UserError, late
from jaxllm.fleet import node
from jaxllm.fleet.choose import digests_of
from jaxllm.fleet.prefills import Prefills
from jaxllm.fleet.replica import Replica, RoutedRequest
from jaxllm.fleet.replica_listener import ReplicaAddress
from jaxllm.fleet.router import NONE_TAKES_WORK, Router
from jaxllm.fleet.supervisor import Supervisor
from jaxllm.metrics import DeviceReport, Load, Metrics, Observer, summed
from jaxllm.outputs import RequestOutput
from jaxllm.request_params import RequestParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import NoTokenizer, load_tokenizer

_log = logging.getLogger(__name__)
CHARACTERS_A_TOKEN = 4  # of a pooled text
# Equal in all replicas.
_SHARED = ("generation_config", "default_params", "eos_ids", "vocab_size", "max_model_len", "block_size", "pooler")


class FleetLLM(StreamingEngine, FleetCalls):
    """As `AsyncLLM`, with `config.data_parallel_size` replicas, behind one queue.

    `num_local` of them are processes on this machine; others connect to `address`.
    """

    drains_replicas = True

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        num_local: int | None = None,
        address: ReplicaAddress | None = None,
        module: str = "jaxllm.fleet.node",
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        hang_timeout: float = 8.0,
        **engine_args: Any,
    ) -> None:
        config = config_of(model, engine_args)
        count = config.data_parallel_size
        num_local = count if num_local is None else min(num_local, count)
        self.replicas = [Replica(number, is_local=number < num_local) for number in range(count)]
        self._router = Router(self.replicas, self._fail)
        super().__init__(
            config,
            self._router,
            time.monotonic,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            hang_timeout=hang_timeout,
        )
        settings = ("enable_lora", "enable_kv_cache_events", "enable_sleep_mode", "kv_transfer_config")
        combinations.check([name for name in settings if getattr(config, name)], [combinations.FLEET])
        self._prefills = Prefills(config, self._router) if config.prefill_replicas else None
        if self._prefills is not None and num_local < count:
            raise combinations.refusal("prefill_replicas", combinations.REMOTE)
        if any(callable(each) for each in config.logits_processors):
            message = "logits_processors must be named, as package.module:function, with data_parallel_size above 1."
            raise UserError(message, "logits_processors")
        if num_local < count and address is None:
            message = f"{count - num_local} of {count} replicas are left to other machines: give data_parallel_address."
            raise UserError(message, "data_parallel_address")
        self._observers: list[list[Observer]] = [[] for _ in self.replicas]
        self._model: ModelInfo | None = None
        self._supervisor = Supervisor(
            self.replicas, self, self._settings_of, hang_timeout=self.hang_timeout, module=module, address=address
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **bounds: Any) -> FleetLLM:
        """Make a fleet, not yet started, from `AsyncEngineArgs`."""
        return cls(engine_args, **bounds)

    async def _begin(self) -> None:
        await self._supervisor.start()

    async def close(self, timeout: float = 30.0) -> bool:
        await super().close(timeout)
        await self._supervisor.close()
        if self._death is not None:
            set_result(self._death, EngineDeadError("The engine was closed."))
        return True

    async def drain_replica(self, number: int) -> None:
        """Send a replica no more requests, restart it when idle, and return when it serves again.

        Raises UnavailableError if it, or every other, accepts no requests.
        """
        if not 0 <= number < len(self.replicas):
            raise UserError(f"replica must be 0 to {len(self.replicas) - 1}, got {number}.", "replica", number)
        if self._prefills is not None and number in self._prefills.decoders:
            if not any(self.replicas[each].takes_work for each in self._prefills.decoders if each != number):
                raise UnavailableError("No other decode replica is available; send SIGTERM to drain the whole server.")
        await self._supervisor.drain(self.replicas[number])

    def _settings_of(self, number: int, path: str) -> tuple[node.Settings, Mapping[str, str]]:
        config = self.config
        engine = asdict(config) | {
            "data_parallel_size": 1,
            "enable_kv_cache_events": config.enable_prefix_caching,
            "seed": config.seed + number,
        }
        num_local = sum(replica.is_local for replica in self.replicas)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        share = len(cores) // num_local
        if self._prefills is not None:
            engine |= self._prefills.settings_of(number)
        settings = node.Settings(
            engine=engine,
            address=path,
            number=number,
            observes=any(self._observers),
            cores=tuple(cores[number * share : (number + 1) * share]),
            hang_timeout=self.hang_timeout,
            log_level=_log.getEffectiveLevel(),
        )
        if config.device == "cpu":
            return settings, {}
        count = config.tensor_parallel_size * config.pipeline_parallel_size
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = given.split(",") if given else [str(device) for device in range(num_local * count)]
        return settings, {"CUDA_VISIBLE_DEVICES": ",".join(visible[number * count : (number + 1) * count])}

    # Called by the supervisor.

    def heard(self, replica: Replica, said: list[Any]) -> None:
        for name, *given in said:
            if name == "output":
                self._put(replica, *given)
            elif name == "error":
                self._fail(*given)
            elif name == "blocks":
                self._router.index.apply(replica.number, *given)
            elif name == "ready":
                self._loaded(replica, *given)
            elif name == "failed":
                (replica.error,) = given
                replica.lost.set()
            elif name == "leave":
                replica.is_drained = True
            elif name in ("step", "tokens", "finished"):
                self._observe(replica, name, given)
            else:
                getattr(replica, f"on_{name}")(*given)
                if name == "beat":
                    vars(self.metrics).update(vars(summed([each.metrics for each in self.replicas])))

    def lost(self, replica: Replica, error: Exception) -> None:
        if self._life.has_ended:
            replica.end(error)
        else:
            self._router.lost(replica, error)

    def hopeless(self, error: Exception) -> None:
        self._died(error)

    def _observe(self, replica: Replica, name: str, given: list[Any]) -> None:
        if name != "step" and self._prefills is not None and replica.number not in self._prefills.decoders:
            return  # clients do not see it
        for observer in self._observers[replica.number]:
            try:
                getattr(observer, name)(*given)
            except Exception:  # statistics must not fail a request
                _log.exception("the observer failed")

    def _put(self, replica: Replica, name: str, output: RequestOutput) -> None:
        replica.note_output(name, sum(len(each.token_ids) for each in output.outputs))
        if output.finished:
            self._router.forget(name)
        if self._prefills is not None and self._prefills.put(name, output):
            return
        stream = self._streams.of_internal_id(name)
        if stream is None:
            return
        output.request_id, output.internal_id = stream.request_id, name
        try:
            stream.put(output, self._clock())
        except Exception:  # fails one request; the others of the frame go on
            _log.exception("an output could not be handed over")
            self._fail(name, RequestFailedError("An output of the request was lost; others go on."))
            return
        if output.finished:
            self._streams.note_over(stream)

    def _fail(self, name: str, error: Exception) -> None:
        self._router.forget(name)
        if self._prefills is not None and self._prefills.put(name, None):
            return
        stream = self._streams.of_internal_id(name)
        if stream is not None:
            self._streams.fail(stream, error)

    def _loaded(self, replica: Replica, known: Mapping[str, Any]) -> None:
        if self._model is None:
            try:
                self._model = self._read_model(known)
            except Exception as error:
                self._died(error)
                return
        other = next((name for name in _SHARED if known[name] != getattr(self._model, name)), None)
        if other is not None:
            why = f"its {other} is another than that of the others: it needs the same model and settings"
            replica.error = UserError(why)
            replica.say_last("refused", why)
            replica.lost.set()
            return
        replica.model = known
        assert self._started is not None
        if all(each.model is not None for each in self.replicas if each.is_local) and not self._started.done():
            self._life.on("ready")
            self._started.set_result(None)

    def _read_model(self, known: Mapping[str, Any]) -> ModelInfo:
        config = self.config
        source = config.tokenizer or config.model
        tokenizer = NoTokenizer(source) if config.skip_tokenizer_init else load_tokenizer(source, config.revision)
        model = ModelInfo(tokenizer=tokenizer, **known)
        if model.pooler is not None and model.pooler.reads_last:
            tokenizer.obey_add_eos_token()
        return model

    @property
    def model(self) -> ModelInfo:
        """The model; raises UnavailableError until a replica has loaded it."""
        if self._model is None:
            raise self._unavailable() or UnavailableError("The model is still being loaded.")
        return self._model

    @property
    def engines(self) -> Sequence[EngineView]:
        return [ReplicaView(self, replica) for replica in self.replicas]

    def add_observer(self, observer: Observer, number: int = 0) -> None:
        self._observers[number].append(observer)

    @property
    def state(self) -> EngineState:
        """The state; "hung" while no replica accepts requests."""
        state = super().state
        return "hung" if state == "serving" and not any(each.takes_work for each in self.replicas) else state

    def _unavailable(self) -> Exception | None:
        error = super()._unavailable()
        if error is None and not any(each.takes_work for each in self.replicas):
            return UnavailableError(NONE_TAKES_WORK)
        return error

    def get_load(self) -> Load:
        loads = [each.get_load() for each in self.replicas if each.model is not None]
        added: dict[str, Any] = {name: sum(getattr(load, name) for load in loads) for name in _ADDED}
        metrics = self.metrics
        return Load(
            **added,
            prefix_hit_rate=metrics.cached_tokens / max(metrics.prompt_tokens, 1),
            step_seconds=max((load.step_seconds for load in loads), default=0.0),
        )

    def device_report(self) -> None:
        """Return None: each replica has one."""

    async def reset_prefix_cache(self) -> bool:
        return all(await self._call_all("reset_prefix_cache"))

    async def kv_events(self, start_sequence: int = 0) -> AsyncGenerator[BlockBatch]:
        raise FeatureDisabledError("kv_events is not supported with data_parallel_size above 1.", "data_parallel_size")
        yield  # makes it a generator

    async def start_profile(self, folder: str, num_steps: int) -> None:
        calls = [each.call("start_profile", f"{folder}/replica-{each.number}", num_steps) for each in self._loaded_ones]
        await asyncio.gather(*calls)

    async def _continue(self) -> None:
        await super()._continue()
        await self._call_all("resume")

    @property
    def _loaded_ones(self) -> list[Replica]:
        return [each for each in self.replicas if each.model is not None]

    async def _call_all(self, name: str) -> list[Any]:
        return await asyncio.gather(*(each.call(name) for each in self._loaded_ones))

    async def _accept(
        self,
        request_id: str,
        prompt: Prompt,
        params: RequestParams | None,
        priority: int,
        options: Mapping[str, Any],
        *,
        client: str | None,
        timeout: float | None,
    ) -> RoutedRequest:
        """Make a request; the chosen replica validates its parameters."""
        unknown = options.keys() - {"lora_request", "kv_transfer_params"}
        if unknown:
            raise TypeError(f"a request has no {', '.join(sorted(unknown))}")
        if options:
            raise combinations.refusal(min(options), combinations.FLEET)
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data") is not None:
            raise combinations.refusal("multi_modal_data", combinations.FLEET)
        text, ids, salt = parts_of(prompt, "token_type_ids")
        digests: Sequence[bytes] = ()
        tokens: Sequence[int]
        count = 1 if params is None else params.num_sequences
        if params is not None and not params.generates:
            length = len(text or "") // CHARACTERS_A_TOKEN if ids is None else len(ids)
            tokens, merged = range(length), SamplingParams()
        else:
            sampling = params if isinstance(params, SamplingParams) else SamplingParams()
            if ids is None:
                assert text is not None
                tokens = await self._tokenized(text, sampling, client, timeout)
                salted = {"cache_salt": salt.decode()} if salt else {}
                prompt = {"prompt": text, "prompt_token_ids": tokens, **salted}
            else:
                tokens = checked_ids(ids, self.model.vocab_size) if len(ids) else []
            if self.config.enable_prefix_caching and self.model.block_size:
                digests = digests_of(tokens, salt, self.model.block_size)
            merged = sampling
        return RoutedRequest(
            request_id=request_id,
            internal_id="",
            name=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            digests=digests,
            params=merged,
            sent=params,
            priority=priority,
            num_sequences=count,
            replicas=self._prefills.decoders if self._prefills is not None else None,
        )

    def _needs(self, accepted: Any) -> asyncio.Future[Any] | None:
        return None if self._prefills is None else self._prefills.begin(accepted)

    async def check_request(
        self, request_id: str, prompt: Prompt, params: Any, priority: int, options: Mapping[str, Any]
    ) -> RoutedRequest:
        accepted = await self._accept(request_id, prompt, params, priority, options, client=None, timeout=None)
        replica = next((each for each in self.replicas if each.takes_work), None)
        if replica is None:
            raise UnavailableError(NONE_TAKES_WORK)
        await replica.call("check", request_id, accepted.prompt, params, priority)
        return accepted

    async def _tokenized(
        self, text: str, params: SamplingParams, client: str | None, timeout: float | None
    ) -> list[int]:
        tokenizer = self.model.tokenizer
        kept = text_to_encode(text, params, tokenizer, self.model.max_model_len)
        if len(kept) <= LONG_TEXT:
            return tokenizer.encode(kept)
        try:
            async with asyncio.timeout(timeout):
                return await self.off_loop(tokenizer.encode, kept, client=client)
        except TimeoutError as error:
            assert timeout is not None
            raise late(timeout) from error

    def _close(self, stream: Any) -> None:
        self._router.leave(stream.internal_id)
        self._streams.close(stream)


class ReplicaView:
    """A replica's `EngineView`, for metrics."""

    def __init__(self, fleet: FleetLLM, replica: Replica) -> None:
        self.config = fleet.config
        self._fleet, self._replica = fleet, replica

    @property
    def model(self) -> ModelInfo:
        return self._fleet.model

    @property
    def metrics(self) -> Metrics:
        return self._replica.metrics

    @property
    def state(self) -> EngineState:
        return self._replica.state

    def get_load(self) -> Load:
        return self._replica.get_load()

    def device_report(self) -> DeviceReport | None:
        return self._replica.device_report()


_ADDED = (
    *("running", "waiting", "waiting_tokens", "kv_blocks_used", "kv_blocks_total", "max_running"),
    *("generated_tokens_per_second", "deferred"),
)
