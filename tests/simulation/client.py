"""A client of one request, and its checks of every output."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.engine.output_processor import MANY_STREAMS_INTERVAL
from jaxllm.errors import EngineError, UserError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.simulation.adapters import request_of
from tests.simulation.beams import BeamTruth, Found
from tests.simulation.device import Violation
from tests.simulation.oracle import (
    BROKEN,
    NUM_LOGPROBS,
    PIECES,
    SPECIAL,
    VOCABULARY,
    BrokenTextError,
    Truth,
    logprob,
)

if TYPE_CHECKING:
    from tests.simulation.reference import Entry
    from tests.simulation.world import World


class Client:
    """Submits a request and reads its outputs: at once, slowly, or not to the end."""

    def __init__(self, world: World, request: dict[str, Any], ids: list[int], params: SamplingParams) -> None:
        self.world = world
        self.request = request
        self.name: str = request["name"]
        self.ids = ids
        self.params = params
        given = request.get("params", {})
        self.beams = BeamSearchParams(**given["beams"]) if "beams" in given else None
        self.prompt: Any = request["text"] if "text" in request else list(ids)
        if "salt" in request:
            self.prompt = {
                "prompt" if "text" in request else "prompt_token_ids": self.prompt,
                "cache_salt": request["salt"],
            }
        has_room = "text" not in request and len(ids) > 1
        self.images = request.get("images", ()) if has_room else ()
        if self.images:
            if not isinstance(self.prompt, dict):
                self.prompt = {"prompt_token_ids": self.prompt}
            pixels = [(length, number) for _, length, number in self.images]
            self.prompt["multi_modal_data"] = {"image": pixels}
        self.source: tuple[int, int] | None = None
        if "source" in request:
            number, length = self.source = (request["source"][0], request["source"][1])
            given = self.prompt if isinstance(self.prompt, dict) else {"prompt_token_ids": self.prompt}
            if "text" in request:
                given = {"decoder_prompt": request["text"]} | (
                    {"cache_salt": request["salt"]} if "salt" in request else {}
                )
            self.prompt = {"encoder_prompt": {"prompt_token_ids": [number] * length}, **given}
        self.salt: str = request.get("salt", "")
        self.folder: int | None = request.get("adapter")  # of its adapter, None without one
        self.adapter = self.weights = 0  # number and content of its adapter, once read
        self.priority: int = request.get("priority", 0)
        self.timeout: float | None = request.get("timeout")
        self.time_limit: float | None = request.get("time_limit")
        self.reads: int | None = request.get("reads")
        self.arrival = world.now
        if self.timeout is not None and self.time_limit is None and len(ids) % 2:  # it arrived before the call
            self.arrival -= self.timeout / 2
        self.latest = world.now  # the latest time before the clock was changed, see `events`
        self.limit = min(world.max_model_len, len(ids) + (params.max_tokens or world.max_model_len))
        self.truths: list[Truth] = []  # by sample, once the engine has queued the request
        self.entries: list[Entry] = []  # of the reference
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, int] = {}  # positions received
        self.prompt_logprobs_told = 0
        self.ends: dict[int, tuple[str, Any]] = {}
        self.num_outputs = 0
        self.is_submitted = False
        self.has_end = False  # its last output was delivered, and no error before it
        self.times: dict[str, float] = {}
        self.enough = MANY_STREAMS_INTERVAL  # tokens between outputs, when its next one was made
        self.is_over = False
        self.may_be_aborted = False
        self.aborted_in: int | None = None  # the turn
        self.was_dropped = False  # the client disconnected
        self.error: BaseException | None = None
        self.pause: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def is_unreadable(self) -> bool:
        """Whether the last tokens of the prompt, which the output's decoder reads first, have no text."""
        if not self.world.tokenizer.is_broken:
            return False
        num_bytes = 0
        for token in reversed(self.ids):
            if token in SPECIAL and self.params.skip_special_tokens:
                continue
            if token == BROKEN:
                return True
            num_bytes += len(PIECES[token])
            if num_bytes >= 3:
                return False
        return False

    @property
    def waits_for_scores(self) -> bool:
        """Whether the first sample, which computes the log-probabilities of the prompt, has no token yet."""
        if self.params.prompt_logprobs is None or not self.entries:
            return False
        first = self.entries[0]
        return first.slot > -2 and first.num_tokens == first.truth.num_prompt

    async def run(self) -> None:
        """Read all outputs, to the last one or an error, and report the end to the world."""
        world = self.world
        world.submitting = self
        stream = world.llm.generate(
            self.prompt,
            self.params if self.beams is None else self.beams,
            self.name,
            priority=self.priority,
            time_limit=self.time_limit,
            timeout=self.timeout,
            arrival=self.arrival,
            lora_request=None if self.folder is None else request_of(self.folder),
        )
        try:
            async for output in stream:
                self._take(output)
                if self.reads is not None and self.num_outputs % abs(self.reads) == 0 and not output.finished:
                    self.pause = world.loop.create_future()
                    await self.pause
                    self.pause = None
            if len(self.ends) < self.params.n:
                raise Violation(f"I7: {self.name} stopped without an end")
        except asyncio.CancelledError:
            self.was_dropped = True
        except (UserError, EngineError, BrokenTextError) as error:
            self.error = error
        except Exception as error:
            world.loop.failures.append(error)
        await stream.aclose()
        self.is_over = True
        try:
            world.note_over(self)
        except Violation as error:
            world.loop.failures.append(error)

    def _take(self, output: RequestOutput) -> None:
        """Check an output and append it to the earlier ones."""
        self.num_outputs += 1
        params = self.params
        if len(self.ends) == params.n:
            raise Violation(f"I9: {self.name} got something after its end")
        if output.request_id != self.name or list(output.prompt_token_ids) != self.ids:
            raise Violation(f"{self.name} got what belongs to another")
        is_delta = params.output_kind is RequestOutputKind.DELTA
        if not is_delta and len(output.outputs) != params.n:
            raise Violation(f"{self.name} misses samples")
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not output.finished:
            raise Violation(f"{self.name} got an output before its end")
        news = 0
        is_due = output.finished
        enough, self.enough = params.stream_interval or self.enough, MANY_STREAMS_INTERVAL
        for part in output.outputs:
            known, text = self.tokens.setdefault(part.index, []), self.texts.get(part.index, "")
            if is_delta:
                tokens, text = known + list(part.token_ids), text + part.text
                news += bool(part.token_ids) or part.finish_reason is not None
            else:
                tokens = list(part.token_ids)
                if tokens[: len(known)] != known or not part.text.startswith(text):
                    raise Violation(f"I10: {self.name} took back what it had told")
                news += len(tokens) > len(known) or part.finish_reason is not None
                text = part.text
            new = len(tokens) - len(known)
            is_due |= new >= enough or (new and not known) or part.finish_reason is not None
            if part.index in self.ends and (tokens != known or text != self.texts.get(part.index, "")):
                raise Violation(f"I9: sample {part.index} of {self.name} goes on after its end")
            if not self.truths:
                if tokens or part.finish_reason not in ("abort", "time_limit"):
                    raise Violation(f"{self.name} got tokens before the engine knew it")
            else:
                self._check_part(part, tokens, text, is_delta, len(known))
            self.tokens[part.index], self.texts[part.index] = tokens, text
            if part.finish_reason is not None:
                self.ends[part.index] = part.finish_reason, part.stop_reason
        if not is_due:
            raise Violation(f"{self.name} was shown something before it was due")
        if not news:
            raise Violation(f"{self.name} got an output without news")
        if output.finished != (len(self.ends) == params.n):
            raise Violation(f"I7: {self.name} is finished, and not")
        if output.finished:
            self._check_times(output)
        for name in ("first_scheduled_time", "first_token_time"):
            value = getattr(output.metrics, name, None)
            if value is not None and self.times.setdefault(name, value) != value:
                raise Violation(f"{self.name} is told another {name} than before")
        if output.prompt_logprobs is not None:
            self._check_prompt(output.prompt_logprobs)
            if is_delta and self.prompt_logprobs_told > 1:
                raise Violation(f"{self.name} is told the log-probabilities of its prompt twice")
        reached = any(self.tokens.values())
        if reached and params.prompt_logprobs is not None and not self.prompt_logprobs_told:
            raise Violation(f"{self.name} misses the log-probabilities of its prompt")
        if reached and output.num_cached_tokens != self.world.cached_of.get(self.name, output.num_cached_tokens):
            raise Violation(f"{self.name} is told another number of cached tokens")

    def _check_times(self, output: RequestOutput) -> None:
        times = output.metrics
        if times is None or times.arrival_time != self.arrival or times.finished_time is None:
            raise Violation(f"{self.name} is told wrong times")
        if any(self.tokens.values()) and None in (times.first_scheduled_time, times.first_token_time):
            raise Violation(f"{self.name} is not told when its first token came")

    def _check_found(self, part: Any, truth: BeamTruth) -> None:
        due = truth.search.outcome()[part.index]
        reason = "stop" if due.is_stopped else "length"
        found = Found(tuple(part.token_ids), part.cumulative_logprob, part.score, due.is_stopped)
        if (found, part.text, part.finish_reason) != (due, truth.final_text(due), reason):
            raise Violation(f"{self.name} found {part}, where {due} is due")
        if (part.seed, part.stop_reason, part.logprobs) != (None, None, None):
            raise Violation(f"{self.name} is told what a search has not")

    def _check_part(self, part: Any, tokens: list[int], text: str, is_delta: bool, num_known: int) -> None:
        truth, params = self.truths[part.index], self.params
        if isinstance(truth, BeamTruth):
            if part.finish_reason in ("stop", "length"):
                self._check_found(part, truth)
                return
        if tuple(tokens) != truth.output(len(tokens)):
            raise Violation(f"I6: {self.name} got tokens that are not its own")
        if part.seed != (truth.seed if params.temperature else None):
            raise Violation(f"{self.name} is told another seed")
        if self.beams is None:
            self._check_logprobs(part, truth, len(tokens), is_delta, num_known)
        reason, stop = part.finish_reason, part.stop_reason
        if reason is None:
            due = truth.text(len(tokens), is_final=False)[0]
            if text != due:
                raise Violation(f"{self.name} was shown {text!r} where {due!r} is due")
        elif reason in ("abort", "time_limit"):
            may = self.may_be_aborted if reason == "abort" else self.time_limit is not None
            if not may:
                raise Violation(f"I7: {self.name} ended with {reason} although it was not asked for")
            is_early = reason == "time_limit" and self.world.now < self.arrival + (self.time_limit or 0.0) - 1e-6
            if is_early and not self.world.fired["clock_back"]:
                raise Violation(f"{self.name} was ended before its time")
            due = truth.text(len(tokens), is_final=True)[0]
            if text != due or (self.beams is None and len(tokens) > len(truth.outcome().tokens)):
                raise Violation(f"{self.name} was left with {text!r} where {due!r} is due")
        elif reason == "error":
            raise Violation("errors are raised, not shown")
        else:
            due = truth.outcome()
            if (tuple(tokens), text, reason, stop) != (due.tokens, due.text, due.reason, due.stop_reason):
                raise Violation(f"{self.name} ended with {(tokens, text, reason, stop)}, where {due} is due")

    def _check_logprobs(self, part: Any, truth: Truth, count: int, is_delta: bool, num_known: int) -> None:
        wanted = self.params.logprobs
        if (part.logprobs is None) != (wanted is None):
            raise Violation(f"{self.name}: log-probabilities that were not asked for, or none")
        if wanted is None:
            return
        first = num_known if is_delta else 0
        if len(part.logprobs) != count - first:
            raise Violation(f"{self.name} misses log-probabilities")
        positions = range(truth.num_prompt, truth.num_prompt + count)
        together = sum(logprob(int(truth.chain[at - 1]), int(truth.tokens[at])) for at in positions)
        if part.cumulative_logprob != together:  # multiples of 1/64: sums are exact
            raise Violation(f"{self.name} is told another sum of log-probabilities")
        for at, entry in enumerate(part.logprobs, truth.num_prompt + first):
            token, chain = int(truth.tokens[at]), int(truth.chain[at - 1])
            if told_of(entry) != logprobs_of(chain, token, wanted):
                raise Violation(f"{self.name} is told {entry}, where {logprobs_of(chain, token, wanted)} is due")

    def _check_prompt(self, told: list[Any]) -> None:
        self.prompt_logprobs_told += 1
        truth = self.truths[0]
        if len(told) != len(self.ids) or told[0] is not None:
            raise Violation(f"{self.name}: the log-probabilities of its prompt are shifted")
        for at in range(1, len(self.ids)):
            token = self.ids[at]
            due = logprobs_of(int(truth.chain[at - 1]), token, self.params.prompt_logprobs or 0)
            if told_of(told[at]) != due:
                raise Violation(f"{self.name} is told another log-probability of its prompt")


def told_of(entry: dict[int, Any]) -> list[tuple[int, float, int]]:
    """Return the tokens of a position with their log-probabilities and ranks, in order."""
    return [(token, each.logprob, each.rank) for token, each in entry.items()]


def logprobs_of(chain: int, token: int, count: int) -> list[tuple[int, float, int]]:
    """Return the expected entry of a position: its token, then the likeliest, as `device._fill_logprobs` makes them."""
    due = {token: (logprob(chain, token), 1 + chain % NUM_LOGPROBS)}
    for number in range(count):
        due.setdefault((chain + number) % VOCABULARY, (logprob(chain, (chain + number) % VOCABULARY), number + 1))
    return [(each, *rest) for each, rest in due.items()]
