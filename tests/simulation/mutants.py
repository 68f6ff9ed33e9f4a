"""Bugs to plant in production code, which the simulation must find; other engines had bugs like these.

A mutant is plain data: a function, a piece of its source, and the replacement.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.support import accounts


@dataclass(frozen=True)
class Mutant:
    """A planted bug."""

    name: str
    target: str  # "room.module.function" or "room.module.Class.method" of jaxllm
    old: str
    new: str
    focus: str = ""  # of traces that find it, see focus.py; random traces would take tens of thousands of steps


HISTORY = [
    Mutant(
        "abort leaves a queued request",
        "scheduler.scheduler.abort",
        "tuple(entry for entry in state.waiting if entry.request.sequence_id not in gone)",
        "state.waiting",
    ),
    Mutant(
        "abort keeps the blocks",
        "scheduler.scheduler.abort",
        "occupancy.vacate(editor, limits, slots)",
        "occupancy.vacate(editor, limits, slots[1:])",
    ),
    Mutant(
        "a finished request is freed again when it is aborted",
        "scheduler.scheduler.commit",
        "occupancy.vacate(editor, limits, row_slots[ended].tolist())",
        "editor.pool.release(editor.tables[row_slots[ended][0]], ()) if ended.any() else None\n"
        "        occupancy.vacate(editor, limits, row_slots[ended].tolist())",
    ),
    Mutant(
        "a preempted request counts as computed",
        "scheduler.admission.admit",
        "start = len(hits) * limits.block_size",
        "is_new = entry.num_tokens == entry.request.num_prompt\n"
        "        start = len(hits) * limits.block_size if is_new else entry.num_tokens - 1",
    ),
    Mutant(
        "a late output is taken after a preemption",
        "scheduler.scheduler.is_live",
        "slots.epochs is not step.epochs",
        "False",
    ),
    Mutant(
        "a prefix block is published before it is written",
        "scheduler.occupancy.publish_prompt",
        "min((start + length) // limits.block_size, len(digests))",
        "len(digests)",
    ),
    Mutant(
        "off by one at a block's end",
        "scheduler.scheduler._grow",
        "slots.length > slots.capacity",
        "slots.length > slots.capacity + 1",
    ),
    Mutant(
        "a request that can never fit is queued",
        "scheduler.scheduler.check_fits",
        "needed > limits.num_blocks",
        "False",
    ),
    Mutant("the salt is not in the key", "engine.input_processor.InputProcessor._root", "accepted.salt", 'b""'),
    Mutant(
        "the list of new blocks is never emptied",
        "scheduler.scheduler.plan",
        "table: list[np.ndarray] = []",
        'table = plan.__dict__.setdefault("kept", [])',
    ),
    Mutant(
        "a recycled row keeps the old mask",
        "engine.input_batch.InputBatch.place",
        "self.rows[slot] = sequence.row",
        "self.rows[slot, :15] = sequence.row[:15]",
    ),
    Mutant(
        "the deadline of a waiting client is dropped",
        "engine.streaming_engine.StreamingEngine.generate",
        "if timeout is not None:",
        "if False:",
    ),
    Mutant(
        "a mask is made when its step is planned, before the last token was read",
        "engine.engine_core.EngineCore._dispatch_next",
        "issued = self.runner.dispatch(step)\n",
        "issued = self.runner.dispatch(step)\n"
        "    if isinstance(issued, HeldStep):\n"
        "        (masks,) = (make(issued.plan) for make in self.features.masks)\n"
        "        issued = self.runner.sample(issued, masks.words, masks.is_masked)\n",
    ),
    Mutant(
        "forced tokens do not void the row in flight",
        "scheduler.scheduler._give",
        "own.num_returned[slots] = own.num_sampled[slots]",
        "pass",
    ),
    Mutant(
        "forced tokens get one block, however many they are",
        "scheduler.scheduler._grow",
        "counts = -(-(slots.length[growing] - slots.capacity[growing]) // limits.block_size)",
        "counts = np.ones(len(growing), np.int32)",
    ),
    Mutant(
        "the step behind a recovery does not wait for its masks",
        "engine.engine_core.EngineCore._dispatch_next",
        "issued = self.runner.dispatch(step)",
        "step.is_held &= not self._failed_steps.count\n    issued = self.runner.dispatch(step)",
    ),
    Mutant(
        "a grammar reads a token that is dropped because of a preemption",
        "engine.features.grammars.GrammarRows.read",
        "scheduler.is_live(self.core.scheduler.state, plan)",
        "plan.samples",
    ),
    Mutant(
        "what was sampled without its mask is taken",
        "engine.features.grammars.GrammarRows.read",
        "counts[late] = 0",
        "pass",
    ),
    Mutant(
        "what continues a token sampled without its mask is taken",
        "scheduler.scheduler._plan_again",
        "own.num_returned[slots] = own.num_sampled[slots]",
        "pass",
    ),
    Mutant(
        "a row whose mask was late is computed from a token too far on",
        "scheduler.scheduler._plan_again",
        "own.num_computed[slots] = own.num_tokens[slots] - 1",
        "own.num_computed[slots] = own.num_tokens[slots]",
    ),
    Mutant(
        "an adapter is not in the key",
        "engine.input_processor.InputProcessor._root",
        "content_root(salt=accepted.salt, content=accepted.content)",
        "content_root(salt=accepted.salt)",
    ),
    Mutant(
        "who waits for an adapter's place claims none",
        "scheduler.adapter_places.AdapterPlaces.admits",
        "self._num_claims += 1",
        "pass",
    ),
    Mutant(
        "an adapter in use is evicted",
        "scheduler.adapter_places.AdapterPlaces.enter",
        "others[len(others) == self._most :]",
        "others[: self._most - 1]",
    ),
    Mutant("adapters stay in use", "scheduler.state.StateEditor.rank_adapters", "if self.adapters:", "if False:"),
    Mutant(
        "adapters stay resident when the device's state is lost, and the host may not have their weights",
        "scheduler.scheduler.reset",
        "editor.adapters = ()",
        "pass",
    ),
    Mutant(
        "who was skipped for its adapter goes to the end of the queue",
        "scheduler.admission.admit",
        "(*skipped, *rest)",
        "(*rest, *skipped)",
    ),
    Mutant(
        "a slot keeps the adapter of its last request",
        "engine.features.adapters.rows.AdapterRows.place",
        "self._numbers[slot] = 0 if adapter is None else",
        "self._numbers[slot] = self._numbers[slot] if adapter is None else",
    ),
    Mutant(
        "an adapter that has changed keeps its number",
        "engine.features.adapters.store.Adapters._load",
        "if before is not None and before.digest == files.digest:",
        "if before is not None:",
    ),
    Mutant(
        "a row whose drafts were rejected is computed from a token too far on",
        "scheduler.drafting.settle",
        "own.num_computed[rows] -= drafts + 1 - sampled",
        "own.num_computed[rows] -= np.maximum(0, drafts - sampled)",
    ),
    Mutant(
        "rejected drafts stay in a row's length",
        "scheduler.drafting.settle",
        "own.length[rows] -= drafts + 1 - sampled",
        "pass",
    ),
    Mutant(
        "drafts are verified behind a request's limit",
        "scheduler.drafting.issue",
        "np.minimum(drafts, slots.limit[rows] - lengths - 1, out=drafts)",
        "pass",
    ),
    Mutant(
        "drafts get no blocks",
        "scheduler.drafting.issue",
        "blocks = np.maximum(0, -(-(drafts - room) // limits.block_size))",
        "blocks = np.zeros(len(rows), np.int32)",
    ),
    Mutant(
        "drafts take the block that a running request needs next",
        "scheduler.drafting.issue",
        "if drafts.any() and blocks.sum() > available - np.count_nonzero(slots.epochs):",
        "if blocks.sum() > available:",
    ),
    Mutant(
        "drafts outlive a step beside chunks of prompts, which makes none",
        "scheduler.scheduler._verify",
        "editor.own_slots.has_drafts[row_slots] = False",
        "pass",
    ),
    Mutant(
        "drafts are taken without a comparison",
        "engine.features.drafts.Drafts.read",
        "yielded.counts = result.counts",
        "yielded.counts = plan.lengths",
    ),
    Mutant(
        "kept drafts count as forced, and are computed once more",
        "engine.engine_core.EngineCore._commit",
        "yielded.counts, result.counts)",
        "yielded.counts)",
    ),
    Mutant(
        "a block is indexed whose last tokens are drafts in flight",
        "scheduler.block_pool.chained",
        "len(tokens) + 1",
        "len(tokens) + 4 * block_size",
    ),
    Mutant(
        "blocks are freed under the children of a beam",
        "scheduler.beam_groups._inherit",
        "pool.share(blocks)",
        "pass",
    ),
    Mutant(
        "the block that two beams write is not copied",
        "scheduler.beam_groups._inherit",
        "if num_partial and keepers[source] != target:",
        "if False:",
    ),
    Mutant(
        "blocks are copied after the step has written them",
        "runner.model_runner.Runner.run",
        "            self._state = small.move(self._state, packed.moves)\n"
        "        self._prepare_sources(packed)  # after moves, which may read blocks that they reuse\n"
        "        own = self.adapters.arguments(packed.adapters, key.shape.adapters)\n"
        "        self._state, returned = self.programs[key](self._params, self._state, packed.buffer, *own)\n",
        "        own = self.adapters.arguments(packed.adapters, key.shape.adapters)\n"
        "        self._state, returned = self.programs[key](self._params, self._state, packed.buffer, *own)\n"
        "        if len(packed.moves):\n            self._state = small.move(self._state, packed.moves)\n",
    ),
    Mutant(
        "a child is given the blocks of its own old sequence",
        "scheduler.beam_groups._inherit",
        "else parents[source][: num_full - begin]",
        "else parents[target][: num_full - begin]",
    ),
    Mutant(
        "the device keeps the old block table of a beam",
        "scheduler.beam_groups._inherit",
        "if block != old",
        "if old is None",
    ),
    Mutant(
        "half of a search is preempted",
        "scheduler.scheduler._grow",
        "victims = beam_groups.members(editor.beam_groups, victim)",
        "victims = beam_groups.members(editor.beam_groups, victim)[-1:]",
        focus="searches",
    ),
    Mutant(
        "beams that come back do not share the blocks of those before them",
        "scheduler.admission._admit_beam_group",
        "            editor.pool.share(shared)\n",
        "            pass\n",
        focus="searches",
    ),
    Mutant(
        "the last that came is preempted, whatever its priority",
        "scheduler.scheduler._grow",
        "key=lambda slot: editor.owner(slot).rank)",
        "key=lambda slot: editor.owner(slot).order)",
        focus="preempted",
    ),
    Mutant(
        "drafts fill the block that the next token needs",
        "scheduler.drafting.issue",
        "np.maximum(0, room - 1)",
        "np.maximum(0, room)",
        focus="drafts",
    ),
    Mutant(
        "a prompt whose last token is computed again loses its block",
        "scheduler.occupancy.vacate",
        "max(digests, record.digests, key=len)",
        "digests",
        focus="late masks",
    ),
    Mutant(
        "a device that drafts is not told where a late row begins",
        "scheduler.scheduler._plan_again",
        "own.num_tokens[slots] if limits.max_drafts else own.num_computed[slots]",
        "own.num_computed[slots]",
        focus="late masks",
    ),
    Mutant(
        "a beam goes on with the token that the device sampled",
        "engine.features.beams.rows.BeamSearches.inputs",
        "places = [",
        "places = [] and [",
    ),
    Mutant(
        "a beam does not wait until its token is chosen",
        "scheduler.beam_groups.held",
        "slots[editor.slots.num_tokens[slots] < editor.slots.length[slots]]",
        "slots[:0]",
    ),
    Mutant(
        "a block is given back while a query still sees its last token",
        "scheduler.windowed.covered",
        "(-(limits.window - 1) // limits.block_size)",
        "(-(limits.window - 2) // limits.block_size)",
    ),
    Mutant(
        "a row that is computed again has lost the beginning of its window",
        "scheduler.windowed.give_back",
        "np.minimum(slots.num_computed, slots.num_tokens - 1)",
        "slots.num_computed",
    ),
    Mutant(
        "the device keeps the entry of a block that was given back",
        "scheduler.windowed.give_back",
        "_add_entries(limits, table, slot, range(old, new), [limits.num_window_blocks] * (new - old))",
        "pass",
    ),
    Mutant(
        "a block is given back in a plan that no step carries out",
        "scheduler.windowed.give_back",
        "works[held] = False",
        "works[:] = True",
    ),
    Mutant(
        "a fork's entry overwrites that of a block that was given back since",
        "scheduler.windowed.give_back",
        "if editor.entries:",
        "if False:",
    ),
    Mutant(
        "a slot keeps its last owner's entries before the window",
        "scheduler.windowed.enter",
        "_add_entries(limits, table, slot, range(entering.num_hits), blocks)",
        "_add_entries(limits, table, slot, range(begin, entering.num_hits), blocks[begin:])",
    ),
    Mutant(
        "a cached prefix is used whose window has gone",
        "scheduler.windowed.cut",
        "near, end = [], at",
        "near, end = near, end",
    ),
    Mutant(
        "a prompt takes the block that a running request needs next",
        "scheduler.windowed.extend",
        "editor.window_pool.num_available - spare",
        "editor.window_pool.num_available",
    ),
    Mutant(
        "a chunk is computed beyond the blocks of windowed layers",
        "scheduler.windowed.extend",
        "return min(length, (end + count) * limits.block_size - start)",
        "return length",
    ),
    Mutant(
        "what a failed request has given back can be found",
        "scheduler.windowed.forget",
        "editor.window_pool.discard(digests[:num_freed])",
        "pass",
    ),
    Mutant(
        "blocks of windowed layers leak when a request ends",
        "scheduler.windowed.leave",
        "editor.window_pool.release(editor.window_tables[slot], ",
        "editor.window_pool.release(editor.window_tables[slot][1:], ",
    ),
    Mutant(
        "a child reads windowed layers from its parent's place on in its own",
        "scheduler.beam_groups.fork",
        "own.num_freed[target] = num_freed[source]",
        "pass",
    ),
    Mutant(
        "windowed layers of a new beam's last block are not copied",
        "runner.small_programs.SmallPrograms.move",
        "moves[moves[:, 0] == group, 1:]",
        "moves[moves[:, 0] == 0, 1:]",
    ),
    Mutant(
        "answers of before a preemption count",
        "scheduler.beam_groups._has_answered",
        "own = [slot for slot in beam_group if slots.num_tokens[slot]]",
        "own = [slot for slot in beam_group if slots.num_tokens[slot] and slots.num_returned[slot]]",
    ),
    Mutant(
        "a block of the host is found before its copy has ended",
        "scheduler.host_tier.HostEditor._store",
        "self._on_way[group, digest] = there",
        "pool.publish([(digest, there)])",
        focus="host",
    ),
    Mutant(
        "a block that the host has evicted stays in its index",
        "scheduler.host_tier.HostEditor._store",
        "there = int(pool.take(1)[0])",
        "there = int(pool.take(1)[0])\n    pool.publish([(old, there) for old, _ in pool.evicted])",
        focus="host",
    ),
    Mutant(
        "a block is loaded into one that a running request has",
        "scheduler.host_tier.HostEditor.load",
        "device.take(len(places)).tolist()",
        "[block for block in blocks if block >= 0][: len(places)] or device.take(len(places)).tolist()",
        focus="host",
    ),
    Mutant(
        "a copy that has failed counts as stored",
        "scheduler.host_tier.HostEditor.land",
        "if each.is_whole and digest:",
        "if digest:",
        focus="host",
    ),
    Mutant(
        "the end of a copy from before a reset is taken for that of a later one",
        "scheduler.host_tier.HostEditor.land",
        "self._storing[place].plan != each.plan",
        "False",
        focus="host",
    ),
    Mutant(
        "the content of a copy from before a reset stands for a later one",
        "runner.host_tier.HostTier.landed",
        "self._newest.get((group, there)) == plan",
        "True",
        focus="host",
    ),
    Mutant(
        "what a failed request has left in the host can be found",
        "scheduler.scheduler.commit",
        "editor.host.forget(editor.owner(slot).digests)",
        "pass",
        focus="host",
    ),
    Mutant(
        "a store on its way is found although its request has failed",
        "scheduler.host_tier.HostEditor.forget",
        'self._storing[group, on_way]._replace(digest=b"")',
        "self._storing[group, on_way]",
        focus="host",
    ),
    Mutant(
        "a block that a plan loads is evicted by that plan",
        "scheduler.host_tier.HostEditor.finish",
        "for group, pool in enumerate(device):",
        "self._release(self._loaded)\n    self._loaded = []\n    for group, pool in enumerate(device):",
        focus="host",
    ),
    Mutant(
        "blocks are loaded before those that they replace are stored",
        "runner.host_tier.HostTier.move",
        "    stores = moves",
        "    state = self._load(state, moves[moves[:, 1] == HOST])\n    stores = moves",
        focus="host",
    ),
    Mutant(
        "the host's blocks of windowed layers are not loaded",
        "runner.host_tier.HostTier._load",
        "loads[loads[:, 0] == group]",
        "loads[loads[:, 0] == 2 * group]",
        focus="host",
    ),
    Mutant(
        "blocks held for a preempted request are kept after its end",
        "scheduler.scheduler.abort",
        "editor.host.let_go(gone)",
        "pass",
        focus="host",
    ),
    Mutant(
        "a copy from before a reset replaces content from another engine",
        "runner.host_tier.HostTier.receive",
        "self._newest.pop((group, there), None)",
        "pass",
        focus="receive",
    ),
    Mutant(
        "a block from another engine is held twice for one request",
        "scheduler.host_tier.HostEditor.receive",
        "{(each.group, each.block) for each in self._held if each.owner == owner}",
        "set()",
        focus="receive",
    ),
    Mutant(
        "a content that is being stored is received, too",
        "scheduler.host_tier.HostEditor.receive",
        "(group, digest) not in self._on_way and",
        "",
        focus="receive",
    ),
    Mutant(
        "a request that runs holds blocks from another engine",
        "scheduler.scheduler.receive",
        "entry = next((each for each in state.waiting",
        "entry = next((each for each in (*state.waiting, *filter(None, state.running))",
        focus="receive",
    ),
    Mutant(
        "the block of a prompt is stored under a digest that it has lost since",
        "scheduler.host_tier.HostEditor.store_due",
        "device[group].find(digest) == block",
        "True",
        focus="disk",
    ),
    Mutant(
        "a request whose blocks never come is passed over for ever",
        "engine.fetches.Fetches.update",
        "if is_late or not fetch.blocks or owner not in waiting:",
        "if not fetch.blocks or owner not in waiting:",
        focus="disk",
    ),
    Mutant(
        "a prefix is loaded whose window has gone from both tiers",
        "scheduler.windowed.cut",
        "if block is None:",
        "if block is None and at + 1 < end:",
        focus="host",
    ),
    Mutant(
        "blocks of different images are shared",
        "scheduler.occupancy.digests_of",
        "if request.media:",
        "if False:",
        focus="images",
    ),
    Mutant(
        "a cached prefix ends inside of an image",
        "scheduler.media.cut",
        "num_blocks = segment.start // block_size",
        "pass",
        focus="images",
    ),
    Mutant(
        "an image is evicted that an earlier row of the plan reads",
        "scheduler.media.EncoderEditor._bring",
        "self._kept.add(segment.digest)",
        "pass",
        focus="images",
    ),
    Mutant(
        "a chunk reads an image for which there is no room",
        "scheduler.media.EncoderEditor.reach",
        "return max(0, segment.start - start)",
        "break",
        focus="images",
    ),
    Mutant(
        "a chunk ends inside an image whose tokens see all of it",
        "scheduler.media.whole",
        "return max(0, segment.start - start)",
        "break",
        focus="whole images",
    ),
    Mutant(
        "a request waits forever for the blocks of a whole image",
        "scheduler.windowed.lacking",
        "if limits.whole_image:",
        "if False:",
        focus="whole images",
    ),
    Mutant(
        "a plan encodes more than its budget",
        "scheduler.media.EncoderEditor._take",
        "if self._num_encoded and",
        "if False and",
        focus="images",
    ),
    Mutant(
        "encoded images are kept when the device has lost them",
        "scheduler.state.StateEditor.forget_cache",
        "if limits.num_media_units:",
        "if False:",
        focus="images",
    ),
    Mutant(
        "a unit of an evicted image is lost",
        "scheduler.media.EncoderEditor._take",
        "self._free += self._entries.pop(idle.pop(0))",
        "self._free += self._entries.pop(idle.pop(0))[: count - len(self._free)]",
        focus="images",
    ),
    Mutant(
        "rotary positions of drafts after images follow from the host's bound",
        "runner.model_runner.Runner._turned",
        "turned - batch.token_places(given.plan)",
        "turned - np.repeat(given.plan.starts, given.plan.lengths)",
        focus="images",
    ),
    Mutant(
        "rows without images are turned like their slot's last",
        "engine.features.media.Images.place",
        "self._shifts[slot] = 0 if images is None else images.shift",
        "self._shifts[slot] = self._shifts[slot] if images is None else images.shift",
        focus="images",
    ),
    Mutant(
        "blocks of different sources are shared",
        "scheduler.sources._digests",
        "chain(source.digest, ",
        "chain(b'', ",
        focus="sources",
    ),
    Mutant(
        "a plan encodes more sources than its budget",
        "scheduler.sources.find",
        "if num_new and editor.num_encoded and",
        "if False and",
        focus="sources",
    ),
    Mutant(
        "a beam does not share its search's source",
        "scheduler.sources.follow",
        "editor.pool.share(blocks)",
        "pass",
        focus="sources",
    ),
    Mutant(
        "the source of a failed request stays cached",
        "scheduler.sources.forget",
        "if source is not None:",
        "if False:",
        focus="sources",
    ),
    Mutant(
        "an encoder fills the blocks that are cached, not those that are new",
        "scheduler.sources.enter",
        "Encode(request.sequence_id, len(arriving.hits), blocks)",
        "Encode(request.sequence_id, arriving.num_new, blocks)",
        focus="sources",
    ),
    Mutant(
        "a row is planned while its token is in flight",
        "scheduler.in_flight.passing",
        "ready(editor)[1:]",
        "[each[:0] for each in ready(editor)]",
        focus="stages",
    ),
    Mutant(
        "results are committed to another batch",
        "runner.model_runner.Runner.sampled_in",
        "self.ticks.steps[-1].plan",
        "self.ticks.steps[0].plan",
        focus="stages",
    ),
    Mutant(
        "forced tokens get no blocks while a dropped row is in flight",
        "scheduler.in_flight.ready",
        "& decodes[batch.slots]",
        "",
        focus="stages",
    ),
    Mutant(
        "a batch is left in the pipeline",
        "engine.engine_core.EngineCore._dispatch_next",
        "(carried := self.runner.carried)",
        "(carried := None)",
        focus="stages",
    ),
    Mutant(
        "all rows that can be planned are, and the next ticks are empty",
        "scheduler.in_flight.share",
        "[most:]",
        "[len(now) :]",
        focus="stages",
    ),
    Mutant(
        "the first stage gets the block tables of all batches",
        "runner.ticks.Ticks.join",
        "self._first_slot(at)",
        "self._first_slot(0)",
        focus="stages",
    ),
    Mutant(
        "a beam's block is copied while other stages still write it",
        "runner.ticks.Ticks.join",
        "self._of_stage(each.moves, at)",
        "self._of_stage(packed[0].moves, at)",
        focus="stages",
    ),
    Mutant(
        "batches of before a failed step go on",
        "engine.engine_core.EngineCore._drop_flights",
        "self.runner.drop_batches()",
        "pass",
        focus="stages",
    ),
    Mutant(
        "blocks of an image are shared among adapters",
        "engine.features.media.Images.claim",
        'accepted.given = rest | {"prompt_token_ids": found}',
        'accepted.given, accepted.content = rest | {"prompt_token_ids": found}, b""',
        focus="images",
    ),
]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant a bug in production code within the context; raise LookupError if the source has changed."""
    names = mutant.target.split(".")
    end = next((at for at, name in enumerate(names) if name[0].isupper()), len(names) - 1)
    path, module = names[end:], importlib.import_module(".".join(("jaxllm", *names[:end])))
    owner: Any = module
    for name in path[:-1]:
        owner = getattr(owner, name)
    original = inspect.getattr_static(owner, path[-1])
    function: Callable[..., Any] = original.fget if isinstance(original, property) else inspect.unwrap(original)
    source = textwrap.dedent(inspect.getsource(function))
    if mutant.old not in source:
        raise LookupError(f"{mutant.name}: {mutant.target} has changed")
    made: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(code, f"<mutant: {mutant.name}>", "exec"), vars(module), made)
    changed = made[path[-1]]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(owner, path[-1], changed))
        if owner is module:  # other modules may have imported it by name
            for other in [each for name, each in sys.modules.items() if name.startswith("jaxllm.")]:
                for name, value in list(vars(other).items()):
                    if value is original:
                        stack.enter_context(mock.patch.object(other, name, changed))
        try:
            yield
        finally:
            accounts.differences.clear()  # caused by the planted bug
