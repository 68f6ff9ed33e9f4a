"""`FleetLLM`: several engines behind the interface of one, each in a process of its own, on this machine or on others.

Starts and restarts its own processes, takes the connections of others, and hands each request to the replica that
`choose` names. Queues and their bounds are those of all replicas together.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import ssl
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.config import EngineConfig
from jaxllm.engine.async_llm import LONG_TEXT, AsyncLLM
from jaxllm.engine.input_processor import text_to_encode
from jaxllm.engine.life_cycle import EngineState
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.errors import EngineDeadError, UnavailableError, UserError, late
from jaxllm.fleet import messages, node
from jaxllm.fleet.replica import Replica, summed
from jaxllm.fleet.router import NONE_TAKES_WORK, Routed, Router
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics import Load, Observer
from jaxllm.outputs import RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import block_pool
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from jaxllm.version import __version__

_log = logging.getLogger(__name__)
LOOK_SECONDS = 0.25  # between two looks at a replica
HELLO_SECONDS = 10.0  # that a connection has to say who it is
START_SECONDS = 120.0  # that a process has to connect: it imports JAX first
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a replica is started again; doubled each time …
WELL_SECONDS = 60.0  # … unless it has served for so long
MOST_FAILED_STARTS = 5  # in a row; then the replica is given up
CHARACTERS_A_TOKEN = 4  # of a text that is pooled, which the replica tokenizes


class FleetLLM(AsyncLLM):
    """As `AsyncLLM`, with `config.data_parallel_size` replicas.

    Of them `num_local` are processes of this machine; others connect to `listen`, HOST:PORT, with `key`, over TLS where
    there is `tls`. `observers` are told what each replica does.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        num_local: int | None = None,
        listen: str | None = None,
        key: str = "",
        tls: ssl.SSLContext | None = None,
        module: str = "jaxllm.fleet.node",  # that our processes run
        **given: Any,
    ) -> None:
        super().__init__(model, **given)
        config = self.config
        for name, is_wanted in (
            ("enable_lora", config.enable_lora),
            ("enable_kv_cache_events", config.enable_kv_cache_events),
            ("record", self._recorder is not None),
        ):
            if is_wanted:
                raise UserError(f"{name} is not supported with data_parallel_size above 1.", name)
        if any(callable(each) for each in config.logits_processors):
            message = "logits_processors must be named, as package.module:function, with data_parallel_size above 1."
            raise UserError(message, "logits_processors")
        count = config.data_parallel_size
        num_local = count if num_local is None else min(num_local, count)
        if num_local < count and listen is None:
            message = f"{count - num_local} replicas of other machines need an address to connect to."
            raise UserError(message, "data_parallel_address")
        self.replicas = [Replica(number, is_local=number < num_local) for number in range(count)]
        self.observers: Sequence[Observer] = ()
        self._router = Router(self.replicas, self._fail)
        self._inbox: Any = self._router
        self._listen, self._key, self._tls, self._module = listen, key, tls, module
        self._model: ModelInfo | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="jaxllm-fleet-")
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    # Its life.

    async def start(self) -> None:
        """Start the replicas; wait until those of this machine have loaded the model, or, without any, another has."""
        if self._started is None:
            self._loop = asyncio.get_running_loop()
            self._started = self._loop.create_future()
            self._death = self._loop.create_future()
            path = str(Path(self._folder.name) / "socket")
            self._servers.append(await asyncio.start_unix_server(self._connected, path))
            if self._listen is not None:
                self._servers.append(await self._open(self._listen))
            for replica in self.replicas:
                self._spawn(self._keep(replica, path) if replica.is_local else self._watch(replica))
        await asyncio.shield(self._started)

    async def _open(self, address: str) -> asyncio.Server:
        """Listen for replicas of other machines."""
        host, _, port = address.rpartition(":")
        try:
            return await asyncio.start_server(self._connected_from_afar, host.strip("[]"), int(port), ssl=self._tls)
        except (OSError, ValueError) as error:
            raise UserError(f"data_parallel_address {address}: {error}", "data_parallel_address") from error

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout: float = 30.0) -> bool:
        """End the replicas; requests that still run fail."""
        self._is_closing = True
        for replica in self.replicas:
            replica.send("stop")
        await super().close(timeout)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closed = EngineDeadError("The engine was closed.")
        for replica in self.replicas:
            self._router.lost(replica, closed)
        await asyncio.gather(*(replica.reap() for replica in self.replicas))
        for server in self._servers:
            server.close()
        self._folder.cleanup()
        return True

    async def _keep(self, replica: Replica, path: str) -> None:
        """Start a replica of this machine, and again whenever it is lost."""
        settings, wait, num_failed = self._settings(replica.number, path), FIRST_WAIT, 0
        while True:
            began = self._clock()
            try:
                replica.start(settings, self._visible_devices(replica.number), self._module)
                why, was_loaded, is_planned = await self._until_lost(replica)
            finally:
                await replica.reap()
            if replica.error is not None and self._model is None:
                self._died(replica.error)  # the model's fault, or the user's: every other would fail as well
                return
            num_failed = 0 if was_loaded else num_failed + 1
            if num_failed == MOST_FAILED_STARTS:
                _log.error("replica %d is given up: %s", replica.number, replica.error or why)
                if all(each.is_local and each.process is None for each in self.replicas):
                    self._died(EngineDeadError("No replica can be started."))
                return
            wait = FIRST_WAIT if is_planned or self._clock() - began > WELL_SECONDS else wait
            if not is_planned:
                _log.warning("replica %d is lost: %s; it is started again in %.1f s", replica.number, why, wait)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    async def _watch(self, replica: Replica) -> None:
        """Take note of when a replica of another machine is lost; it is started there, and connects again."""
        while True:
            await replica.connected.wait()
            why, _, _ = await self._until_lost(replica)
            _log.warning("replica %d is lost: %s; it may connect again", replica.number, why)

    async def _until_lost(self, replica: Replica) -> tuple[str, bool, bool]:
        """Wait until a replica is of no more use, and run elsewhere what it ran.

        Returns why it is lost, whether it had loaded the model, and whether that was asked for.
        """
        why, is_planned = "", False
        while not why:
            with suppress(TimeoutError):
                await asyncio.wait_for(replica.lost.wait(), LOOK_SECONDS)
            silent = self._clock() - replica.heard
            if replica.is_drained and not replica.live:
                why, is_planned = "it is drained", True
            elif replica.process is not None and replica.process.poll() is not None:
                why = f"its process has ended with {replica.process.returncode}"
            elif replica.lost.is_set():
                why = "its connection has ended" if replica.error is None else str(replica.error)
            elif silent > (self.hang_timeout if replica.connected.is_set() else START_SECONDS):
                why = f"it has said nothing for {silent:.0f} s"
            elif replica.state == "hung":
                why = "a step hangs"
        was_loaded = replica.model is not None
        self._router.lost(replica, UnavailableError(f"The replica that ran the request is lost: {why}."))
        replica.is_drained = False
        return why, was_loaded, is_planned

    async def drain_replica(self, number: int) -> None:
        """Give a replica no more work, and start it anew when it has none; others go on."""
        if not 0 <= number < len(self.replicas):
            raise UserError(f"replica must be 0 to {len(self.replicas) - 1}, got {number}.", "replica", number)
        replica = self.replicas[number]
        if replica.takes_work and sum(each.takes_work for each in self.replicas) == 1:
            raise UnavailableError("No other replica takes work now; the server itself drains at SIGTERM.")
        replica.is_drained = True
        while replica.is_drained:
            await asyncio.sleep(LOOK_SECONDS)

    def _settings(self, number: int, path: str) -> node.Settings:
        """Describe a replica of this machine."""
        config = self.config
        engine = asdict(config) | {
            "data_parallel_size": 1,
            "enable_kv_cache_events": config.enable_prefix_caching,
            "seed": config.seed + number,  # of requests that bring none
        }
        num_local = sum(each.is_local for each in self.replicas)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        share = len(cores) // num_local
        return node.Settings(
            engine=engine,
            address=path,
            number=number,
            observes=bool(self.observers),
            cores=tuple(cores[number * share : (number + 1) * share]),
            hang_timeout=self.hang_timeout,
        )

    def _visible_devices(self, number: int) -> Mapping[str, str]:
        """Name the GPUs that a replica may see."""
        if self.config.device == "cpu":
            return {}
        count = self.config.tensor_parallel_size
        own = range(number * count, (number + 1) * count)
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if given == [""]:
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
        return {"CUDA_VISIBLE_DEVICES": ",".join(given[each] for each in own if each < len(given))}

    # What replicas say.

    async def _connected_from_afar(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._connected(reader, writer, is_local=False)

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_local: bool = True
    ) -> None:
        """Hear a replica out."""
        replica = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                (name, version, number, key, _), *rest = await messages.read_frame(reader)
            replica = self._of_hello(name, version, number, key, is_local)
            if replica is None:
                return
            replica.connect(writer)
            self._heard(replica, rest)
            while True:
                self._heard(replica, await messages.read_frame(reader))
        except (EOFError, OSError, TimeoutError):
            pass
        except Exception:  # what it says makes no sense
            _log.exception("a connection of a replica is closed")
        finally:
            writer.close()
            if replica is not None:
                replica.lost.set()

    def _of_hello(self, name: str, version: str, number: int | None, key: str, is_local: bool) -> Replica | None:
        """Find the replica that has connected; None if it is none of ours."""
        if name != "hello" or version != __version__:
            _log.warning("a replica of version %s is refused; this is %s", version, __version__)
            return None
        if is_local:
            return self.replicas[number] if number is not None else None
        if not hmac.compare_digest(str(key).encode(), self._key.encode()):
            _log.warning("a replica with a wrong key is refused")
            return None
        free = (each for each in self.replicas if not each.is_local and not each.connected.is_set())
        replica = next(free, None)
        if replica is None:
            _log.warning("a replica is refused: there are %d already", len(self.replicas))
        return replica

    def _heard(self, replica: Replica, said: list[Any]) -> None:
        """Take in a frame."""
        replica.heard = now = self._clock()
        for name, *given in said:
            if name == "output":
                request, output = given
                self._put(replica, request, output, now)
            elif name == "error":
                request, error = given
                self._fail(request, error)
            elif name == "blocks":
                self._router.index.apply(replica.number, *given)
            elif name == "ready":
                self._spawn(self._loaded(replica, *given))
            elif name == "failed":
                replica.error = given[0]
                replica.lost.set()
            elif name in ("step", "tokens", "finished"):
                if self.observers:
                    getattr(self.observers[replica.number], name)(*given)
            else:
                getattr(replica, f"on_{name}")(*given)
                if name == "beat":
                    vars(self.metrics).update(vars(summed([each.metrics for each in self.replicas])))

    def _put(self, replica: Replica, name: str, output: RequestOutput, now: float) -> None:
        """Hand an output to its reader."""
        count = sum(len(each.token_ids) for each in output.outputs)
        replica.note_output(name, count)
        stream = self._streams.of_internal_id(name)
        if output.finished:
            self._router.forget(name)
        if stream is None:
            return  # its reader has gone
        output.request_id, output.internal_id = stream.request_id, name
        stream.put(output, now)
        if output.finished:
            self._streams.note_over(stream)

    def _fail(self, name: str, error: Exception) -> None:
        """Fail a request."""
        self._router.forget(name)
        stream = self._streams.of_internal_id(name)
        if stream is not None:
            self._streams.fail(stream, error)

    async def _loaded(self, replica: Replica, known: Mapping[str, Any]) -> None:
        """Take note that a replica has loaded the model."""
        if self._model is None:
            tokenizer = await asyncio.to_thread(self._tokenizer)
            self._model = ModelInfo(tokenizer=tokenizer, **known)
            if self._model.pooler is not None and self._model.pooler.pooling == "last":
                tokenizer.obey_add_eos_token()
        replica.model = known
        own = [each for each in self.replicas if each.is_local]
        assert self._started is not None
        if all(each.model is not None for each in own) and not self._started.done():
            self._life.on("ready")
            self._started.set_result(None)

    def _tokenizer(self) -> Tokenizer:
        config = self.config
        source = config.tokenizer or config.model
        return NoTokenizer(source) if config.skip_tokenizer_init else load_tokenizer(source, config.revision)

    # What `AsyncLLM` asks of its engine.

    @property
    def model(self) -> ModelInfo:
        """The model, as all replicas have it; UnavailableError while none has loaded it."""
        if self._model is None:
            raise self._unavailable() or UnavailableError("The model is still being loaded.")
        return self._model

    @property
    def engine(self) -> Any:
        """What there is of one engine: the model."""
        return SimpleNamespace(model=self.model)

    @property
    def state(self) -> EngineState:
        """What the fleet does: "hung" while no replica takes work."""
        state = self._life.state(is_hung=False)
        return "hung" if state == "serving" and not any(each.takes_work for each in self.replicas) else state

    def _unavailable(self) -> Exception | None:
        error = self._life.unavailable(is_hung=False, was_started=self._started is not None)
        if error is None and not any(each.takes_work for each in self.replicas):
            return UnavailableError(NONE_TAKES_WORK)
        return error

    def get_load(self) -> Load:
        """Say how busy the replicas are together."""
        loads = [each.get_load() for each in self.replicas if each.model is not None]
        added: dict[str, Any] = {name: sum(getattr(load, name) for load in loads) for name in _ADDED}
        metrics = self.metrics
        return Load(
            **added,
            prefix_hit_rate=metrics.cached_tokens / max(metrics.prompt_tokens, 1),
            step_seconds=max((load.step_seconds for load in loads), default=0.0),
        )

    def device_report(self) -> None:
        """Return nothing: each replica has its own."""

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts; False where requests run."""
        return all(await self._call_all("reset_prefix_cache"))

    async def start_profile(self, folder: str, num_steps: int) -> None:
        """Begin a trace of each replica's next steps, in folders of their own."""
        calls = [each.call("start_profile", f"{folder}/replica-{each.number}", num_steps) for each in self._loaded_ones]
        await asyncio.gather(*calls)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await super().resume()
        await self._call_all("resume")

    @property
    def _loaded_ones(self) -> list[Replica]:
        return [each for each in self.replicas if each.model is not None]

    async def _call_all(self, name: str) -> list[Any]:
        """Call a method of every replica's engine."""
        return await asyncio.gather(*(each.call(name) for each in self._loaded_ones))

    async def _accept(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | BeamSearchParams | None,
        priority: int,
        lora_request: LoRARequest | None,
        *,
        client: str | None,
        timeout: float | None,
    ) -> Routed:
        """Find out what a request's way depends on; its replica checks it."""
        if lora_request is not None:
            raise UserError("adapters are not supported with data_parallel_size above 1.", "lora_request")
        text, ids, salt = parts_of(prompt, "token_type_ids")
        digests: list[bytes] = []
        tokens: Sequence[int]
        if isinstance(params, PoolingParams):
            length = len(text or "") // CHARACTERS_A_TOKEN if ids is None else len(ids)
            tokens, merged, count = range(length), SamplingParams(), 1
        else:
            own = params if isinstance(params, SamplingParams) else SamplingParams()
            if ids is None:
                assert text is not None
                tokens = await self._tokenized(text, own, client, timeout)
                salted = {"cache_salt": salt.decode()} if salt else {}
                prompt = {"prompt": text, "prompt_token_ids": tokens, **salted}
            else:
                tokens = checked_ids(ids, self.model.vocab_size) if len(ids) else []
            digests = self._digests(tokens, salt)
            merged, count = own, params.beam_width if isinstance(params, BeamSearchParams) else own.n
        return Routed(
            request_id=request_id,
            internal_id="",
            name=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            digests=digests,
            params=merged,
            sent=params,
            options={"priority": priority},
            num_sequences=count,
        )

    async def check_request(
        self, request_id: str, prompt: Prompt, params: Any, priority: int, lora_request: LoRARequest | None
    ) -> Routed:
        """Let a replica check a request, as it will again when it runs it."""
        accepted = await self._accept(request_id, prompt, params, priority, lora_request, client=None, timeout=None)
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

    def _digests(self, ids: Sequence[int], salt: bytes) -> list[bytes]:
        """Name the full blocks of a prompt, as replicas do."""
        size = self.model.block_size
        if not self.config.enable_prefix_caching or not size:
            return []
        parent, digests = block_pool.content_root(salt, b""), []
        packed = np.asarray(ids[: len(ids) // size * size], np.int32).tobytes()
        for start in range(0, len(packed), 4 * size):
            parent = block_pool.chain(parent, packed[start : start + 4 * size])
            digests.append(parent)
        return digests

    def _close(self, stream: Any) -> None:
        self._router.leave(stream.internal_id)
        self._streams.close(stream)


_ADDED = (
    *("running", "waiting", "waiting_tokens", "kv_blocks_used", "kv_blocks_total", "max_running"),
    "generated_tokens_per_second",
)
