"""Invariants of a world: after every turn, when no request runs, and after the engine has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.engine import kv_events
from jaxllm.sampling_params import RequestOutputKind
from tests.simulation.device import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

TICK = 0.01  # seconds of a turn
ROUNDING = 1e-6  # seconds by which a timer may be late


def check_turn(world: World, began: float) -> None:
    """Check metrics and loads, and that each client got its outputs in time. `began` is the start of the turn."""
    if world.is_dead:
        return
    reference, metrics, device = world.reference, world.engine.metrics, world.runner.device
    running, waiting, tokens, used = reference.loads()
    load = world.thread.load
    share = world.cached_tokens / world.prompt_tokens if world.prompt_tokens else 0.0
    sizes = world.setting["num_slots"], world.setting["num_blocks"], share
    if (load.max_running, load.kv_blocks_total, load.prefix_hit_rate) != sizes:
        raise Violation(f"I11: the sizes are told as {load}, where {sizes} are due")
    if (load.running, load.waiting, load.waiting_tokens, load.kv_blocks_used) != (running, waiting, tokens, used):
        raise Violation(f"I11: the load is told as {load}, where {(running, waiting, tokens, used)} is due")
    counted = (
        *(metrics.generated_tokens, metrics.preemptions, metrics.prompt_tokens),
        *(metrics.cached_tokens, metrics.recoveries, metrics.steps, metrics.computed_tokens, metrics.forced_tokens),
        *(
            metrics.adapter_loads,
            metrics.images_encoded,
            metrics.drafting_rows,
            metrics.draft_tokens,
            metrics.accepted_tokens,
        ),
    )
    due = (
        *(reference.num_generated, reference.num_preempted, world.prompt_tokens),
        *(world.cached_tokens, world.num_recoveries, device.num_steps, device.num_tokens),
        *(reference.num_forced, world.held.num_put, world.runner.encoder.num_encoded if world.runner.encoder else 0),
        *(device.drafting_rows, device.draft_tokens, device.accepted_tokens),
    )
    if counted != due:
        raise Violation(f"I11: metrics count {counted}, where {due} is due")
    if world.reported != [device.num_chunk_tokens + reference.num_generated, reference.num_generated]:
        raise Violation(f"I11: the observer was told of {world.reported} tokens")
    if world.num_told != world.due_to_tell and not world.is_deaf:
        raise Violation(f"I8: the observer was told of {world.num_told} tokens of {world.due_to_tell}")
    rests = world.pausing and not reference.by_id and not world.submitted
    world.turns_pausing = world.turns_pausing + 1 if rests else 0
    if world.turns_pausing > 3:
        raise Violation("a pause waits, and nothing runs")
    if world.is_draining and began >= world.drain_until + ROUNDING:
        for client in world.clients:
            if client.pause is None:
                raise Violation(f"I7: {client.name} waits although the time of the drain is over")
    if world.setting["block_events"] and len(world.follower.stored) != len(reference.blocks.index):
        raise Violation("the events of the prefix cache do not add up to it")
    batches = world.llm._blocks._batches
    if len(batches) > 1 and sum(len(batch.events) for batch in batches) > kv_events.LOGGED_EVENTS:
        raise Violation("I13: the log of the prefix cache's events grows")
    if world.llm._blocks._next and not batches:
        raise Violation("the log of the prefix cache's events has lost the last batch, too")
    if len(world.engine.outputs.sequences) != len(reference.by_id):
        raise Violation("I13: the engine keeps samples that have ended, or lost some")
    for turn, client in world.left:
        if turn < world.turn and any(entry.slot > -2 for entry in client.entries):
            raise Violation(f"{client.name} has gone, and its request runs on")
    world.left = [(turn, client) for turn, client in world.left if turn == world.turn]
    interval = world.last_interval
    for client in world.clients:
        if client.pause is not None or client.waits_for_scores:
            for entry in client.entries:
                entry.seen = entry.num_tokens
            continue
        if client.aborted_in is not None and client.aborted_in < world.turn:
            raise Violation(f"I7: {client.name} was aborted, and still waits")
        if client.timeout is not None and began >= client.arrival + client.timeout + ROUNDING:
            raise Violation(f"I7: the deadline of {client.name} has passed, and it still waits")
        is_late = client.time_limit is not None and began - TICK >= client.arrival + client.time_limit
        if is_late and not world.is_paused:
            raise Violation(f"I7: the time of {client.name} is over, and it still waits")
        if client.params.output_kind is RequestOutputKind.FINAL_ONLY:
            continue
        enough = client.params.stream_interval or interval
        for index, entry in enumerate(client.entries):
            told = len(client.tokens.get(index, ()))
            new = entry.num_tokens - entry.truth.num_prompt - told
            if entry.slot == -2 and index not in client.ends:
                raise Violation(f"{client.name} was not told that sample {index} has ended")
            # When the engine's default interval becomes shorter, samples without a new token are not shown at once.
            has_grown, entry.seen = (
                entry.num_tokens > entry.seen or bool(client.params.stream_interval),
                entry.num_tokens,
            )
            if entry.slot > -2 and ((new >= enough and has_grown) or (new and not told)):
                raise Violation(f"{client.name} was not shown {new} tokens")


def check_idle(world: World) -> None:
    """Check that an engine without requests holds no blocks, streams or timers."""
    world.reference.compare()
    state, engine = world.engine.scheduler.state, world.engine
    pools = (state.pool, *([] if state.window_pool is None else [state.window_pool]))
    if any(pool.num_available != pool.num_blocks for pool in pools) or state.num_running or state.waiting:
        raise Violation("I1: blocks are held by no request")
    if engine.outputs.groups or engine.outputs.sequences or engine.scheduler.requests:
        raise Violation("I13: requests are kept after their end")
    if world.llm._inbox.counts() != (0, 0) or len(world.llm._streams):
        raise Violation("I13: the inbox counts what is not there")
    if world.llm._num_preparing:
        raise Violation("I13: a place in the queue is kept for a prompt that is not being made")
    if world.draining is None and world.loop.next_timer() is not None:
        raise Violation("I13: a timer is kept for no request")
    if engine.metrics.finished != dict(world.reasons):
        raise Violation(f"I11: {engine.metrics.finished} ended, where {dict(world.reasons)} were told")


def check_over(world: World) -> None:
    """Check that an ended engine has no waiting client, stream or call."""
    for client in world.clients:
        raise Violation(f"I7: {client.name} waits for a dead engine")
    if world.draining is not None and world.draining.done() and world.draining.result() and world.num_cut_off:
        raise Violation("a drain that was cut off says that all were through")
    streams = world.llm._streams
    if len(streams) or streams._by_internal_id or streams._num_awaited:
        raise Violation("I13: streams are kept although their readers have gone")
    for task in (*world.tasks, *([world.following] if world.following else [])):
        if not task.done():
            raise Violation("a call of the engine never returns")
