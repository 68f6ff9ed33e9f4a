"""Faults of a step: those of the device (`device.Faults`), and those injected into production code."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from jaxllm.engine import async_llm, engine_core, fetches, kv_events, output_processor
from jaxllm.engine.features.adapters import store
from jaxllm.engine.input_batch import InputBatch
from jaxllm.engine.recovery import MAX_EXHAUSTED, MAX_FAILURES
from jaxllm.engine.sequence import Sequence as Output
from jaxllm.runner import model_runner, small_programs
from jaxllm.runner.batch import Shape
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler import block_pool, drafting
from jaxllm.scheduler.block_pool import PoolEditor
from jaxllm.scheduler.state import Plan
from tests.simulation.adapters import FOLDERS
from tests.simulation.device import VARIANTS, Flight, Violation
from tests.simulation.events import happen
from tests.simulation.grammars import Constraint
from tests.simulation.requests import submit
from tests.simulation.stand_ins import InjectedError, no_span

if TYPE_CHECKING:
    from tests.simulation.world import World

HANG = 8.0  # seconds of a step after which the engine counts as hung


class StepFaults:
    """Injects the faults that events of the trace have armed."""

    def __init__(self, world: World) -> None:
        self.world = world

    def before_dispatch(self, shape: Shape) -> None:
        """Fail before or after the step takes the state, or take very long."""
        world = self.world
        if world.armed.pop("compile_stall", None):
            world.fired["compile_stall"] += 1
            world.now += 60.0
            world.is_hung = True
            submit(world, {"name": "probe", "ids": [5], "params": {}})
            world.loop.run()
            world.is_hung = False
        self._exhaust("out_of_memory", shape.tokens)
        if "dies" in world.armed:
            self.fail("dies", is_lost=False)
        for kind in ("raise_before", "raise_after"):
            if world.armed.pop(kind, None):
                self.fail(kind, is_lost=kind == "raise_after")

    def before_sample(self) -> None:
        """Fail between the halves of a step."""
        self._exhaust("sample_out_of_memory")
        for kind in ("sample_raises_before", "sample_raises_after"):
            if self.world.armed.pop(kind, None):
                self.fail(kind, is_lost=kind == "sample_raises_after")

    def _exhaust(self, kind: str, tokens: int = 16) -> None:
        """Fail for lack of memory: once, until one request has failed for it, or until the engine gives up."""
        armed = self.world.armed
        limit = armed.get(kind)
        if limit is None or tokens < limit:
            return
        times = armed[f"{kind} times"] = armed.get(f"{kind} times", 0) + 1
        if times == {1: 1, 4: MAX_FAILURES, 16: MAX_EXHAUSTED * MAX_FAILURES}[limit]:
            del armed[kind], armed[f"{kind} times"]
        self.fail(kind, is_lost=True, words="RESOURCE_EXHAUSTED")

    def before_put(self) -> None:
        """Fail while an adapter is put on the device."""
        if self.world.armed.pop("put_raises", None):
            self.fail("put_raises", is_lost=False)

    def before_load(self) -> None:
        """Fail while blocks of the host's tier are loaded to the device."""
        if self.world.armed.pop("load_raises", None):
            self.fail("load_raises", is_lost=False)

    def before_fill(self) -> None:
        """Fail while masks are made."""
        if self.world.armed.pop("fill_raises", None):
            self.fail("fill_raises", is_lost=False)

    def in_consume(self, constraint: Constraint) -> None:
        """Fail while a grammar reads a token, which ends that request only."""
        world = self.world
        if not world.armed.pop("grammar_raises", None):
            return
        world.fired["grammar_raises"] += 1
        own = next(each for each in world.engine.outputs.sequences.values() if constraint_of(each) is constraint)
        truths = world.client_of[own.sequence_id].truths
        truths[own.index].has_lost_grammar = True
        for truth in truths:
            truth.may_fail = True
        raise InjectedError("grammar_raises")

    def is_wanted(self, number: int, row: int) -> bool:
        """Whether the result of a row of a plan is still wanted."""
        entry, turn, samples, admission, _ = self.world.reference.plans[number][row]
        return samples and entry.slot >= 0 and entry.admission == admission and turn > entry.num_returned

    def while_in_flight(self, flight: Flight) -> None:
        """Let events happen while a step runs; its result may be late or lost."""
        world = self.world
        if world.armed.pop("result_late", None):
            world.fired["result_late"] += 1
            world.now += 5.0
            since = world.thread.step_since
            if since is None or world.llm._is_hung != (world.now - since > HANG):
                raise Violation("a step that is late counts as hung before its time, or not behind it")
        load, (num_new, _) = world.thread.load, world.llm._inbox.counts()
        if load.running + load.waiting + num_new < len(world.reference.by_id):
            raise Violation("I11: what was taken in is in no load while a step runs")
        events, world.mid = world.mid, []
        for event in events:
            happen(world, event[1], event[2:])
        if world.armed.pop("result_lost", None):
            self.fail("result_lost", is_lost=True)
        world.loop.run()
        world.failures, world.most_failures = 0, MAX_FAILURES

    def leaves_late(self, place: int) -> bool:
        """Whether the mask at index `place` of a step's masks is not ready in time."""
        return bool(self.world.armed.get("masks_late", 0) >> place % 8 & 1)

    def note_filled(self, num_late: int) -> None:
        """Count the late masks of a step; end this fault."""
        if self.world.armed.pop("masks_late", None) is not None:
            self.world.fired["masks_late"] += num_late

    def is_late(self, slot: int) -> bool:
        """Whether the mask of a slot's row was late."""
        constraint = constraint_of(self.world.engine._batch.owner(slot))
        return constraint is not None and constraint.is_late

    def not_finite(self, samples: Sequence[bool]) -> Sequence[int]:
        """Return the row whose numbers are not finite, at most one, among those that sample."""
        world = self.world
        if "not_finite" not in world.armed or not any(samples):
            return ()
        candidates = [row for row, is_sampled in enumerate(samples) if is_sampled]
        world.fired["not_finite"] += 1
        return (candidates[world.armed.pop("not_finite") % len(candidates)],)

    def unsettled(self, slot: int) -> int:
        """Return the number of drafts of a slot in steps that were not committed when the newest step was planned."""
        entry = self.world.reference.running[slot]
        own = self.world.reference.plans[self.world.plans[-1].number]
        return entry.unsettled - sum(row[-1] for row in own if row[0] is entry)

    def check_private(self, slot: int, group: int, written: Collection[int]) -> None:
        """Check that drafts are written to blocks that no other request uses and the prefix index lacks."""
        reference = self.world.reference
        entry = reference.running[slot]
        blocks, named = (reference.windowed, entry.window.values()) if group else (reference.blocks, entry.table)
        for block in written:
            if block not in named or blocks.references[block] != 1 or block in blocks.index.values():
                raise Violation("I16: a draft is written where another may read")

    def check_unshared(self, group: int, block: int) -> None:
        """Check that a load writes a block that its plan has allocated for it."""
        reference = self.world.reference
        blocks = (reference.blocks, reference.windowed)[group]
        if blocks.references[block] < 1 or block not in [each[4] for each in reference.host.loads if each[0] == group]:
            raise Violation("a block is loaded into that no request was given for it")

    def note_verified(self, drafts: int, had: int, count: int) -> None:
        """Count a row that verified drafts."""
        fired = self.world.fired
        fired["drafts_verified"] += drafts
        fired["drafts_kept"] += count - 1
        fired["drafts_all_kept"] += count == 1 + drafts
        fired["drafts_all_wrong"] += count == 1 and had > 0
        fired["drafts_missing"] += not had

    def strikes_score(self) -> bool:
        """Whether the log-probabilities of the prompts of this step are not finite."""
        world = self.world
        if world.armed.pop("score_not_finite", None) is None:
            return False
        world.fired["score_not_finite"] += 1
        return True

    def fail(self, kind: str, is_lost: bool, words: str = "") -> None:
        """Raise the error of a failed step; `is_lost`: the step had taken the state, which is lost."""
        world = self.world
        world.fired[kind] += 1
        world.failures += 1
        world.num_recoveries += 1
        if is_lost:
            world.runner.device.is_lost = True
        raise InjectedError(f"{kind} {words}")

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Inject faults into production code, lower bounds so that small worlds reach them, and silence logs."""
        world = self.world
        take, place, variant_of = PoolEditor.take, InputBatch.place, InputBatch.variant

        def refusing(editor: PoolEditor, count: int) -> np.ndarray:
            if world.takes_until_refusal:
                world.takes_until_refusal -= 1
                if not world.takes_until_refusal:
                    self.fail("allocation_refused", is_lost=False)
            return take(editor, count)

        def placing(batch: InputBatch, slot: int, sequence: Any) -> None:
            if world.armed.pop("request_fault", None):
                world.fired["request_fault"] += 1
                world.num_recoveries += 1
                admitted = [each.request.sequence_id for each in world.plans[-1].admitted]
                for number, client, cached in world.counted:  # another plan admits and counts them again
                    if number in admitted[admitted.index(sequence.sequence_id) :]:
                        world.was_admitted.remove(client)
                        world.prompt_tokens -= len(client.ids)
                        world.cached_tokens -= cached
                raise InjectedError("request_fault")
            place(batch, slot, sequence)

        def narrowest(batch: InputBatch, plan: Plan) -> Variant:
            variant = variant_of(batch, plan)
            rows = world.reference.plans[plan.number]
            if VARIANTS.index(variant) != max(entry.truth.variant for entry, *_ in rows):
                raise Violation("a step samples more widely than its rows need, or less")
            return variant

        logger = logging.getLogger("jaxllm")
        before = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        refuses = any(event[1] == "allocation_refused" for event in world.trace.events)
        try:
            with (
                mock.patch.object(PoolEditor, "take", refusing if refuses else take),
                mock.patch.object(drafting, "PROBE_ROWS", 8),
                mock.patch.object(fetches, "MOST_SECONDS", 0.05),
                mock.patch.object(fetches, "REST_SECONDS", 0.2),
                mock.patch.object(block_pool, "MOST_STALE", 8),  # stale entries of the cached blocks' queue are removed
                mock.patch.object(async_llm, "LONG_TEXT", 6),
                mock.patch.object(kv_events, "LOGGED_EVENTS", 20),
                mock.patch.object(store, "ADAPTERS", FOLDERS),
                mock.patch.object(InputBatch, "place", placing),
                mock.patch.object(InputBatch, "variant", narrowest),
                mock.patch.object(output_processor, "FEW_STREAMS", world.few_streams),
                mock.patch.object(small_programs, "PATCH_ENTRIES", 3),  # one call cannot send all changes
                mock.patch.object(small_programs, "PATCH_EXTRAS", 1),
                mock.patch.object(small_programs, "SCORED_ROWS", 5),
                mock.patch.object(engine_core, "span", no_span),
                mock.patch.object(model_runner, "span", no_span),
                mock.patch.object(engine_core, "uninterrupted", nullcontext),  # the engine runs in the main thread here
            ):
                yield
        finally:
            logger.setLevel(before)


def constraint_of(own: Output) -> Any:
    """Return the constraint of a sequence, or None."""
    constraints = own.group.states.get("grammars")
    return None if constraints is None else constraints[own.index]
