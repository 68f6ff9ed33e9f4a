"""An engine of several ranks that share the experts of a mixture: data-parallel attention with expert parallelism.

Each rank is an `EngineCore` with a scheduler, slots and KV blocks. In a step of the engine all ranks plan, one program
runs their plans, and all commit. A request stays on the rank that is chosen when it is added.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence
from typing import cast

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.engine_core import EngineCore, StuckSequences
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import Parts, load_parts
from jaxllm.engine.recovery import FailedSteps
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import EngineError, RequestIdInUseError
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.runner.profiling import span
from jaxllm.runner.ranks import RankedRunner, RankedStep, RankFlight
from jaxllm.scheduler import block_pool
from jaxllm.scheduler.block_pool import PoolEditor
from jaxllm.scheduler.recorded import Recorder
from jaxllm.scheduler.state import BlockEvent, Plan, State

WORTH = 3  # tokens of load that a cached token outweighs, as in fleets (fleet/choose.py)
_ADDED = ("running", "waiting", "waiting_tokens", "kv_blocks_used", "kv_blocks_total", "max_running")
RankFlights = list[tuple[Plan, RankFlight] | None]  # by rank; None: it has no plan


class RankedEngine(LLMEngine):
    """Continuous batching for one mixture over several ranks. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Start the ranks on one runner, without a recorder."""
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        parts = load_parts(config, progress, self.metrics) if parts is None else parts
        if not isinstance(parts.runner, RankedRunner) or recorder is not None:
            raise ValueError("ranks need a RankedRunner, and cannot be recorded")
        self.model, self.runner, self.start_phases = parts.model, parts.runner, parts.start_phases
        self.ranks = [
            EngineCore(config, metrics=self.metrics, parts=dataclasses.replace(parts, runner=parts.runner.rank(number)))
            for number in range(parts.runner.num_ranks)
        ]
        first = self.ranks[0]
        self.features, self.inputs = first.features, first.inputs
        for rank in self.ranks:  # seeds follow the order of arrival
            rank.inputs.random = self.inputs.random
        self.num_rows = 0
        self.held = None
        self._runner = parts.runner
        self._clock, self._depth = parts.clock, 2 if config.async_scheduling else 1
        self._steps: deque[tuple[RankFlights, RankedStep]] = deque()
        self._in_flight = deque()  # those of ranks are in `_steps`
        self._failed_steps = FailedSteps()
        self._profile, self._is_closed, self._planned = None, False, None

    @property
    def unfinished(self) -> Collection[str]:
        return [name for rank in self.ranks for name in rank.unfinished]

    def has_unfinished_requests(self) -> bool:
        return self.held is None and any(rank.outputs.groups for rank in self.ranks)

    def add(self, requests: Sequence[Accepted]) -> None:
        self._check_open()
        ids = set(self.unfinished)
        for accepted in requests:
            if accepted.internal_id in ids:
                raise RequestIdInUseError(
                    f"request id {accepted.request_id!r} is in use; choose another.", "request_id"
                )
            ids.add(accepted.internal_id)
        loads = [rank.load().waiting_tokens + _running_tokens(rank.scheduler.state) for rank in self.ranks]
        shares = [list[Accepted]() for _ in self.ranks]
        for accepted in requests:
            number = self._choose(accepted, loads)
            shares[number].append(accepted)
            loads[number] += len(accepted.prompt_token_ids) * accepted.num_sequences
        try:
            for rank, own in zip(self.ranks, shares, strict=True):
                if own:
                    rank.add(own)
        except Exception:
            self.abort_requests([(accepted.internal_id, "abort") for accepted in requests])
            raise

    def _choose(self, accepted: Accepted, loads: Sequence[int]) -> int:
        """Return the rank with the least load for a request; its cached blocks count as less load."""
        if not self.config.enable_prefix_caching:
            return loads.index(min(loads))
        size = self.config.block_size
        root = block_pool.content_root(salt=accepted.salt, content=accepted.content)
        digests = block_pool.chained(root, np.asarray(accepted.prompt_token_ids, "<i4").tobytes(), size)
        pools = [PoolEditor(rank.scheduler.state.pool) for rank in self.ranks]
        costs = [load - WORTH * size * len(pool.look_up(digests)) for load, pool in zip(loads, pools, strict=True)]
        return costs.index(min(costs))

    def abort_requests(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]:
        return [output for rank in self.ranks for output in rank.abort_requests(requests)]

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        return ()

    def load(self) -> Load:
        loads = [rank.load() for rank in self.ranks]
        return loads[0]._replace(**{name: sum(getattr(load, name) for load in loads) for name in _ADDED})

    def step(self) -> list[RequestOutput]:
        """Complete one step of all ranks and return the due outputs."""
        if not self.has_unfinished_requests() and self.held is None:
            self._steps.clear()
        return super().step()

    def _step(self) -> list[RequestOutput]:
        ended = [list[SequenceGroup]() for _ in self.ranks]
        try:
            while len(self._steps) < self._depth and self._issue_all():
                self._end_all_stuck(self._sample_next(), ended)
            if not self._steps:
                raise EngineError("requests wait, but none of them can be planned; please report this as a bug.")
            flights, _ = self._steps.popleft()
            read = [own and (own[0], *rank._read(*own)) for rank, own in zip(self.ranks, flights, strict=True)]
        except Exception as error:
            return [*self._due(ended), *self._recover(error)]
        self._failed_steps.reset()
        committed = []
        with span("commit"):
            for rank, own, groups in zip(self.ranks, read, ended, strict=True):
                if own is not None:
                    plan, result, yielded = own
                    events = rank._commit(plan, result, yielded)
                    groups += rank._take_in(plan, result, events)
                    committed.append((rank, plan, result, events))
        outputs: list[RequestOutput] = []
        stuck = [StuckSequences() for _ in self.ranks]
        try:
            stuck = self._sample_next()
        except Exception as error:
            outputs = self._recover(error)
        with span("output"):
            self.num_rows = sum(len(plan.slots) for _, plan, _, _ in committed)
            for rank, plan, result, events in committed:
                outputs += rank._show(plan, result, events)
            try:
                self._end_all_stuck(stuck, ended)  # text ended the others
            except Exception as error:
                outputs += self._recover(error)
            return [*outputs, *self._due(ended)]

    def _issue_all(self) -> bool:
        """Dispatch a step of all ranks that have a plan; return False if none has."""
        issued = [rank._issue() if rank.unfinished else None for rank in self.ranks]
        flights = cast("RankFlights", issued)
        if not any(flights):
            return False
        step = self._runner.dispatch_all([own and own[1].given for own in flights])
        for own in flights:
            if own is not None:
                own[1].step = step
        self._steps.append((flights, step))
        return True

    def _sample_next(self) -> list[StuckSequences]:
        """Sample the next step if it is held; return each rank's sequences that cannot continue."""
        if not self._steps or not self._steps[0][1].is_held:
            return [[] for _ in self.ranks]
        flights, step = self._steps[0]
        with span("masks"):
            masks = [own and rank._masks(own[0]) for rank, own in zip(self.ranks, flights, strict=True)]
        self._runner.sample_all(step, [own and (own.words, own.is_masked) for own in masks])
        return [own.stuck if own else [] for own in masks]

    def _end_all_stuck(self, stuck: Sequence[StuckSequences], ended: Sequence[list[SequenceGroup]]) -> None:
        for rank, own, groups in zip(self.ranks, stuck, ended, strict=True):
            groups += rank._end_stuck(own)

    def _due(self, ended: Sequence[list[SequenceGroup]]) -> list[RequestOutput]:
        now = self._clock()
        return [
            output
            for rank, groups in zip(self.ranks, ended, strict=True)
            if groups
            for output in rank.outputs.due(groups, now)
        ]

    def _recover(self, error: Exception) -> list[RequestOutput]:
        self._planned = next((rank._planned for rank in self.ranks if rank._planned is not None), None)
        return super()._recover(error)

    def _end_failed(self, group: SequenceGroup) -> list[RequestOutput]:
        return next(rank for rank in self.ranks if group.internal_id in rank.outputs.groups)._end_failed(group)

    def _largest(self, plan: Plan) -> SequenceGroup | None:
        planned = [(rank, own) for rank in self.ranks if (own := rank._planned) is not None and len(own.lengths)]
        for rank, own in sorted(planned, key=lambda each: -each[1].lengths.max()):
            if (found := rank._largest(own)) is not None:
                return found
        return None

    def _restart(self) -> None:
        self._steps.clear()
        self._runner.renew()
        for rank in self.ranks:
            rank.scheduler.reset()

    def recompute(self) -> None:
        self._steps.clear()
        for rank in self.ranks:
            rank.recompute()

    def reset_prefix_cache(self) -> bool:
        if any(rank.scheduler.state.num_running for rank in self.ranks):
            return False
        self.recompute()
        return True

    def close(self) -> None:
        self._is_closed = True
        if self._profile is not None:
            self._profile.stop()
        self._steps.clear()
        for rank in self.ranks:
            rank.close()
        self._runner.close()


def engine_type(config: EngineConfig) -> type[LLMEngine]:
    return RankedEngine if config.shares_experts else LLMEngine


def _running_tokens(state: State) -> int:
    return int(state.slots.length[state.slots.epochs > 0].sum())
