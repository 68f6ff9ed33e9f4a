"""The scheduler: pure functions from state and event to state and plan.

Letters: S slots, R rows of a plan, P tokens per block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from jaxllm.errors import ContextLengthError
from jaxllm.outputs import FinishReason
from jaxllm.scheduler import beam_groups, drafting, host_tier, in_flight, media, occupancy, sources, windowed
from jaxllm.scheduler.admission import admit
from jaxllm.scheduler.host_tier import Landed
from jaxllm.scheduler.state import (
    NO_MOVES,
    NO_ROWS,
    Admission,
    Events,
    Fork,
    Limits,
    Plan,
    Request,
    Source,
    State,
    StateEditor,
    Waiting,
)


def check_fits(limits: Limits, num_prompt: int, limit: int, width: int = 1, source: Source | None = None) -> None:
    """Raise ContextLengthError if a request of at most `limit` tokens, or a beam group of `width`, exceeds the pool."""
    needed = -(-max(num_prompt, limit - 1) // limits.block_size)  # the last token is never computed
    most = windowed.most(limits.window, limits.block_size, limits.whole_image)
    windowed_needed = width * min(needed, most) if limits.window else 0
    if width > 1:
        needed = beam_groups.blocks_needed(limits, num_prompt, limit, width)
    needed += sources.num_blocks(source, limits.block_size)
    if needed > limits.num_blocks:
        raise ContextLengthError(
            f"The request may reach {limit} tokens and would need {needed} KV blocks of {limits.block_size} "
            f"tokens, but the whole pool has {limits.num_blocks}. Lower max_tokens, or raise num_kv_blocks.",
            num_prompt,
            limits.num_blocks * limits.block_size,
        )
    if windowed_needed > limits.num_window_blocks:
        raise ContextLengthError(
            f"{width} sequences that run together would need {windowed_needed} KV blocks of windowed layers, and there "
            f"are {limits.num_window_blocks}. Lower the number of sequences, or raise num_kv_blocks.",
            num_prompt,
            limits.num_blocks * limits.block_size,
        )


def add(state: State, limits: Limits, requests: Sequence[Request]) -> State:
    """Queue requests; raise UserError, without queuing any, if one could not run alone."""
    editor = StateEditor(state)
    entries: list[Waiting] = []
    beam_groups.check(requests)
    widths = Counter(request.beam_group for request in requests if request.beam_group)
    for request in requests:
        if request.adapter and not limits.max_adapters:
            raise ValueError(f"request {request.name!r:.80} has an adapter, and there are no places for any")
        check_fits(limits, request.num_prompt, request.limit, widths.get(request.beam_group, 1), request.source)
        before = entries[-1] if entries else None
        if request.media and (not limits.num_media_units or request.beam_group):
            raise ValueError(f"request {request.name!r:.80} has images, which no encoder or no beam search reads")
        if limits.whole_image and any(segment.length > limits.whole_image for segment in request.media):
            raise ValueError(f"request {request.name!r:.80} has an image of more than {limits.whole_image} tokens")
        if (0 if request.source is None else request.source.length) > limits.max_source:
            raise ValueError(f"request {request.name!r:.80} has a source, which no encoder reads")
        is_sample = before is not None and before.request.root == request.root and before.request.media == request.media
        if before and is_sample and before.request.tokens == request.tokens:
            digests = before.digests  # another sample of the prompt
        else:
            digests = occupancy.digests_of(request, limits, (), request.num_prompt)
        entries.append(Waiting(request, editor.num_added, request.num_prompt, digests))
        editor.num_added += 1
    editor.enqueue(entries)
    return editor.done()


def abort(state: State, limits: Limits, request_ids: Collection[int]) -> State:
    """Remove requests and their beam groups, and release their blocks; ignore unknown ids."""
    gone = frozenset(request_ids)
    editor = StateEditor(state)
    queue = [entry.request for entry in state.waiting if entry.request.beam_group]
    if queue:
        gone = beam_groups.closure(queue, gone)
    if any(entry.request.sequence_id in gone for entry in state.waiting):
        editor.waiting = tuple(entry for entry in state.waiting if entry.request.sequence_id not in gone)
    slots = [slot for slot in _taken_slots(editor) if editor.owner(slot).request.sequence_id in gone]
    if editor.beam_groups:
        slots = sorted(beam_groups.with_members(editor.beam_groups, slots))
    if slots:
        occupancy.vacate(editor, limits, slots)
    if limits.num_host_blocks:
        editor.host.let_go(gone)
    return editor.done()


def land(state: State, limits: Limits, landed: Sequence[Landed]) -> State:
    editor = StateEditor(state)
    if limits.num_host_blocks:
        editor.host.land(landed)
    return editor.done()


def receive(
    state: State, limits: Limits, owner: int, blocks: Sequence[tuple[int, int]]
) -> tuple[State, tuple[int, ...]]:
    """Take fetched blocks of a waiting request's prompt, (group, index) each, into the host's tier.

    Returns the host block for the content of each; -1: not wanted.
    """
    entry = next((each for each in state.waiting if each.request.sequence_id == owner), None)
    digests = () if entry is None or not limits.num_host_blocks else entry.digests
    wanted = [group < limits.num_groups and index < len(digests) for group, index in blocks]
    if not any(wanted):
        return state, (-1,) * len(blocks)
    editor = StateEditor(state)
    known = [(group, digests[index]) for (group, index), is_known in zip(blocks, wanted, strict=True) if is_known]
    found = iter(editor.host.receive(owner, known))
    return editor.done(), tuple(next(found) if is_known else -1 for is_known in wanted)


def pass_over(state: State, limits: Limits, request_ids: Collection[int]) -> State:
    """Admit none of these requests until the next call or reset; other requests may overtake them."""
    editor = StateEditor(state)
    if limits.num_host_blocks:
        editor.host.passed_over = frozenset(request_ids)
    return editor.done()


def reset(state: State, limits: Limits) -> State:
    """Clear the cache, for a device that lost it: running requests return to the queue with their tokens."""
    editor = StateEditor(state)
    slots = _taken_slots(editor)
    for slot in slots:
        occupancy.requeue(editor, limits, slot)
    occupancy.vacate(editor, limits, slots)
    editor.forget_cache(limits)
    editor.adapters = ()
    return editor.done()


def plan(state: State, limits: Limits, now: float) -> tuple[State, Plan]:
    """Plan the next step: decodes, chunks of running prompts, then admissions, in one token budget."""
    editor = StateEditor(state)
    table: list[np.ndarray] = []
    if limits.stores_prompts and state.host is not None and state.host.due:
        pools = (editor.pool, editor.window_pool) if limits.window else (editor.pool,)
        editor.host.store_due(editor.num_planned + 1, limits.max_stores, pools)
    if limits.window:
        windowed.give_back(editor, limits, table, _held(editor))
    preempted = _grow(editor, limits, table)

    moves = NO_MOVES
    if editor.entries or editor.copies:
        entries, moves = beam_groups.take_changes(editor)
        table.insert(0, entries)

    num_computed, length = editor.slots.num_computed, editor.slots.length
    chunking = num_computed < editor.slots.num_prefill
    decodes = (num_computed < length) & (length < editor.slots.limit) & ~chunking
    if editor.beam_groups or editor.batches:
        decodes[_held(editor)] = False
    if editor.batches:
        in_flight.share(editor, decodes)
    row_slots = decodes.nonzero()[0]
    starts = num_computed[row_slots]
    num_decodes = len(row_slots)
    lengths, samples = _ones(num_decodes)
    num_sampled = editor.slots.num_sampled + decodes
    editor.issue(num_computed=num_computed + decodes, length=length + decodes, num_sampled=num_sampled)
    sample_numbers = num_sampled[row_slots]

    budget = limits.max_step_tokens - num_decodes
    rows = _continue_prompts(editor, limits, chunking, budget, table) if chunking.any() else []
    admitted: list[Admission] = []
    if editor.waiting and not preempted:
        admit(editor, limits, rows, budget, admitted, table)
    if rows:
        chunks = np.asarray(rows, np.int32)
        reaches_end = _issue_chunks(editor, chunks)
        row_slots = np.concatenate([row_slots, chunks[:, 0]])
        starts = np.concatenate([starts, chunks[:, 1]])
        lengths = np.concatenate([lengths, chunks[:, 2]])
        samples = np.concatenate([samples, reaches_end])
        sample_numbers = editor.slots.num_sampled[row_slots]
    num_drafts = 0
    if limits.max_drafts:
        may_draft = not rows and bool(editor.slots.may_draft[row_slots].all())
        num_drafts, lengths = _verify(editor, limits, row_slots, lengths, table, may_draft)
    if editor.batches:
        in_flight.enter(editor, row_slots[samples])
    editor.num_planned += 1
    if limits.num_host_blocks:
        pools = (editor.pool, editor.window_pool) if limits.window else (editor.pool,)
        moved = editor.host.finish(editor.num_planned, limits.max_stores, pools)
        moves = np.concatenate([host_tier.as_array(moved), moves]) if moved else moves
    state = editor.done()
    return state, Plan(
        now=now,
        num_decodes=num_decodes,
        slots=row_slots,
        epochs=state.slots.epochs,
        starts=starts,
        lengths=lengths,
        samples=samples,
        sample_numbers=sample_numbers,
        table=table[0] if len(table) == 1 else np.concatenate([np.zeros((0, 3), np.int32), *table]),
        admitted=tuple(admitted),
        preempted=preempted,
        number=state.num_planned,
        adapters=state.adapters,
        num_drafts=num_drafts,
        proposes=bool(limits.max_drafts and state.slots.has_drafts[row_slots].any()),
        capacity=state.slots.capacity[row_slots] if limits.max_drafts else None,
        moves=moves,
        encodes=editor.encodes if limits.num_media_units or limits.max_source else (),
    )


def commit(
    state: State,
    limits: Limits,
    step: Plan,
    tokens: np.ndarray,
    is_finite: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    sampled: np.ndarray | None = None,
) -> tuple[State, Events]:
    """Record the tokens of a step: one per row of its plan, int32[R]; rows without a sample are ignored.

    With `counts`, int32[R], tokens are int32[R, W], `counts` valid ones per row: those sampled, `sampled`, int32[R]
    (None: one each), then forced ones, which the next plans compute like a prompt's. They are cut at the first stop
    token and at the request's limit. A row with a count of 0 was not sampled in time: a later plan computes its last
    token again.

    Results of requests that ended, were preempted or got further tokens since are dropped, and sampled again equally:
    randomness depends only on seed and position. Non-finite logits end the request with its beam group. Rows of beam
    groups yield no tokens: see `fork`.
    """
    slots = state.slots
    editor = StateEditor(state)
    live = is_live(state, step)
    failed_slots: list[int] = []
    if is_finite is not None and not is_finite.all():
        failed_slots = step.slots[live & ~is_finite].tolist()
        live &= is_finite
    if counts is not None:
        late = live & (counts == 0)
        live &= ~late
        _plan_again(editor, limits, step.slots[late])
    answered, complete = NO_ROWS, ()
    if editor.beam_groups:
        if failed_slots:
            failed_slots = beam_groups.with_members(editor.beam_groups, failed_slots)
            live &= ~np.isin(step.slots, failed_slots)
        answered, complete = beam_groups.take_answers(editor, step, live)
    rows = live.nonzero()[0]
    row_slots, sample_numbers, yielded = step.slots, step.sample_numbers, tokens
    if len(rows) < len(row_slots):
        row_slots, sample_numbers, yielded = row_slots[rows], sample_numbers[rows], yielded[rows]
    limit, num_tokens = slots.limit[row_slots], slots.num_tokens[row_slots] + 1
    ended = num_tokens >= limit
    if counts is None and not (ended.any() and (num_tokens > limit).any()):
        num_new, _ = _ones(len(rows))
        stopped = _stops(editor, row_slots, yielded)
        ended |= stopped
    else:
        wanted = np.minimum(limit - num_tokens + 1, 1 if counts is None else counts[rows])
        num_new, stopped, yielded = _cut(editor, row_slots, yielded if yielded.ndim == 2 else yielded[:, None], wanted)
        num_tokens += num_new - 1
        ended = stopped | (num_tokens >= limit)
    editor.own_slots.num_tokens[row_slots] = num_tokens
    editor.own_slots.num_returned[row_slots] = sample_numbers
    on_device = _ones(len(rows))[0] if sampled is None else sampled[rows]
    if step.num_drafts:
        drafting.settle(editor, row_slots, step.lengths[rows] - 1, on_device)
    if counts is not None:
        _give(editor, row_slots[(num_new > on_device) & ~ended])

    ids = slots.ids[row_slots]
    finished: dict[int, FinishReason] = {}
    for row in ended.nonzero()[0].tolist():
        finished[int(ids[row])] = "stop" if stopped[row] else "length"
    failed = tuple(slots.ids[failed_slots].tolist()) if failed_slots else ()
    if finished or failed:
        for slot in failed_slots:  # their blocks may contain the cause
            editor.pool.forget(editor.tables[slot], editor.owner(slot).digests)
            if limits.num_host_blocks:
                editor.host.forget(editor.owner(slot).digests)
            if limits.window:
                windowed.forget(editor, slot)
            if limits.num_media_units:
                editor.media.forget(editor.owner(slot).request.media)
            if limits.max_source:
                sources.forget(editor, limits, slot)
        occupancy.vacate(editor, limits, failed_slots, may_publish=False)
        occupancy.vacate(editor, limits, row_slots[ended].tolist())
    return editor.done(), Events(
        rows=rows,
        ids=ids,
        counts=num_new,
        tokens=yielded,
        finished=finished,
        failed=failed,
        answered=answered,
        complete=complete,
    )


def fork(state: State, limits: Limits, moves: Sequence[Fork]) -> State:
    """Continue the members of a beam group as children of members.

    The caller appends the tokens, to the parent's tokens before this call.
    """
    editor = StateEditor(state)
    beam_groups.fork(editor, limits, moves)
    return editor.done()


def is_live(state: State, step: Plan) -> np.ndarray:
    slots = state.slots
    live = step.samples & (step.sample_numbers > slots.num_returned[step.slots])
    if slots.epochs is not step.epochs:
        live &= slots.epochs[step.slots] == step.epochs[step.slots]
    return live


def _stops(editor: StateEditor, row_slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    slots = editor.slots
    stopped = tokens == slots.stop_id[row_slots]
    if slots.has_more_stops.any():
        for row in slots.has_more_stops[row_slots].nonzero()[0].tolist():
            stopped[row] = int(tokens[row]) in editor.owner(int(row_slots[row])).request.stop_ids
    return stopped


def _cut(
    editor: StateEditor, row_slots: np.ndarray, tokens: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each row of int32[R, W], `wanted` tokens long, after its first stop token.

    Returns lengths, whether rows were stopped, and the remaining tokens of all rows, flat.
    """
    stopped = np.zeros(len(row_slots), np.bool_)
    num_new = wanted.astype(np.int32)
    for column in range(tokens.shape[1]):
        stops = _stops(editor, row_slots, tokens[:, column]) & (column < num_new)
        num_new[stops] = column + 1
        stopped |= stops
    return num_new, stopped, tokens[np.arange(tokens.shape[1]) < num_new[:, None]]


def _give(editor: StateEditor, slots: np.ndarray) -> None:
    """Send all known tokens of slots to the device; drop results in flight."""
    if not len(slots):
        return
    own = editor.own_slots
    own.num_prefill[slots] = own.length[slots] = own.num_tokens[slots]
    own.num_returned[slots] = own.num_sampled[slots]


def _plan_again(editor: StateEditor, limits: Limits, slots: np.ndarray) -> None:
    """Recompute the last known tokens of slots; drop results in flight."""
    if not len(slots):
        return
    own = editor.own_slots
    own.length[slots] = own.num_tokens[slots]
    own.num_computed[slots] = own.num_tokens[slots] - 1
    # A device that drafts begins decode rows at its lengths, and chunks at the host's.
    own.num_prefill[slots] = own.num_tokens[slots] if limits.max_drafts else own.num_computed[slots]
    own.num_returned[slots] = own.num_sampled[slots]


def _held(editor: StateEditor) -> np.ndarray:
    """Return the slots without a newest token that the next plan could compute, intp[·]."""
    held = beam_groups.held(editor) if editor.beam_groups else NO_ROWS
    return np.concatenate([held, in_flight.passing(editor)]) if editor.batches else held


def _grow(editor: StateEditor, limits: Limits, table: list[np.ndarray]) -> tuple[int, ...]:
    """Allocate blocks for slots that lack capacity, preempting the last in rank as needed.

    Adds to `table`; returns the ids of preempted requests.
    """
    preempted: list[int] = []
    while True:
        slots = editor.slots
        full = (slots.length > slots.capacity) & (slots.length < slots.limit)
        if editor.beam_groups or editor.batches:
            full[_held(editor)] = False
        growing = full.nonzero()[0]
        lacking = windowed.lacking(editor, limits) if limits.window else {}
        if not len(growing) and not lacking:
            return tuple(preempted)
        counts = -(-(slots.length[growing] - slots.capacity[growing]) // limits.block_size)
        if counts.sum() <= editor.pool.num_available and (
            not limits.window or windowed.can_grow(editor, growing, counts, lacking)
        ):
            _hand_out(editor, limits, growing, counts, table)
            if limits.window:
                windowed.grow(editor, limits, growing, counts, lacking, table)
            return tuple(preempted)
        # Requests with their last token in flight release their blocks soon.
        ending = (slots.length >= slots.limit) & (slots.num_computed >= slots.num_prefill)
        victim = max((editor.slots.epochs * ~ending).nonzero()[0].tolist(), key=lambda slot: editor.owner(slot).rank)
        victims = beam_groups.members(editor.beam_groups, victim)
        for slot in victims:
            preempted.append(editor.owner(slot).request.sequence_id)
            occupancy.requeue(editor, limits, slot)
        occupancy.vacate(editor, limits, victims, is_preempted=True)


def _hand_out(
    editor: StateEditor, limits: Limits, slots: np.ndarray, counts: np.ndarray, table: list[np.ndarray]
) -> None:
    taken = editor.pool.take(int(counts.sum()))
    index = editor.slots.capacity[slots] // limits.block_size
    editor.own_slots.capacity[slots] += counts * limits.block_size
    if len(taken) > len(slots):
        index = np.repeat(index, counts) + np.arange(len(taken)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = np.repeat(slots, counts)
    tables = editor.tables
    for slot, block in zip(slots.tolist(), taken.tolist(), strict=True):
        tables[slot] += (block,)
    columns = index * limits.num_groups if limits.window else index
    table.append(np.array((slots, columns, taken), np.int32).T)


def _verify(
    editor: StateEditor,
    limits: Limits,
    row_slots: np.ndarray,
    lengths: np.ndarray,
    table: list[np.ndarray],
    may_draft: bool,
) -> tuple[int, np.ndarray]:
    """Add drafts to the rows of a plan; return their total and the rows' new lengths.

    No drafts if a row must not draft, or with prompt chunks: drafts pay least with many requests.
    """
    if not may_draft:
        if editor.slots.has_drafts[row_slots].any():
            editor.own_slots.has_drafts[row_slots] = False
        return 0, lengths
    drafts, blocks = drafting.issue(editor, limits, row_slots)
    growing = blocks.nonzero()[0]
    if len(growing):
        _hand_out(editor, limits, row_slots[growing], blocks[growing], table)
        if limits.window:
            windowed.grow(editor, limits, row_slots[growing], blocks[growing], {}, table)
    return int(drafts.sum()), lengths + drafts


def _continue_prompts(
    editor: StateEditor, limits: Limits, chunking: np.ndarray, budget: int, table: list[np.ndarray]
) -> list[tuple[int, int, int]]:
    """Continue running prompts by rank; return rows of (slot, start, length)."""
    spare = int(np.count_nonzero(editor.slots.epochs)) if limits.window else 0
    rows: list[tuple[int, int, int]] = []
    for slot in sorted(chunking.nonzero()[0].tolist(), key=lambda slot: editor.owner(slot).rank):
        if budget == 0 or len(rows) == limits.max_step_chunks:
            break
        start = int(editor.slots.num_computed[slot])
        length = min(int(editor.slots.num_prefill[slot]) - start, budget)
        if limits.num_media_units:
            length = occupancy.reach(editor, limits, editor.owner(slot).request, start, length)
            if not length:
                continue
        if limits.window:
            length = windowed.extend(editor, limits, slot, start, length, spare, table)
            if limits.whole_image:
                length = media.whole(editor.owner(slot).request.media, start, length)
                if not length:
                    continue
        budget -= length
        rows.append((slot, start, length))
        occupancy.publish_prompt(editor, limits, slot, start, length)
    return rows


def _issue_chunks(editor: StateEditor, chunks: np.ndarray) -> np.ndarray:
    """Plan chunks, int32[·, 3]; return which reach the end of their sequence."""
    slots = chunks[:, 0]
    num_computed, length = editor.own_slots.num_computed, editor.own_slots.length
    num_computed[slots] += chunks[:, 2]
    reaches_end = num_computed[slots] == length[slots]
    editor.own_slots.num_sampled[slots] += reaches_end
    length[slots] += reaches_end & (length[slots] < editor.slots.limit[slots])
    return reaches_end


@lru_cache(maxsize=64)
def _ones(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths of one token, and flags that all rows sample; read-only."""
    lengths, samples = np.ones(count, np.int32), np.ones(count, np.bool_)
    lengths.flags.writeable = samples.flags.writeable = False
    return lengths, samples


def _taken_slots(editor: StateEditor) -> list[int]:
    return editor.slots.epochs.nonzero()[0].tolist()
