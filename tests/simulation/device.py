"""A simulated device without arithmetic, which records the content of the KV cache and checks every read of a step.

The runner is the production one except for its programs: it chooses among compiled shapes, packs the buffer and sends
separately the data that does not fit. A program here reads that buffer as `step.py` does. Each token's position in the
cache holds a hash of the sequence up to that token, with its salt and adapter. A step writes, then compares the content
that each row reads with the expected sequence, `oracle.Truth`, of the request whose seed is in the slot's sampling row.
The tokens that it samples are those of `oracle.Truth`, and the mask of a row with a grammar must be the expected mask.

Drafts are the next tokens of the expected sequence, some of them replaced by wrong ones. A wrong draft leaves the hash
of a wrong sequence in the cache, so a later read of it is found. A *place* is a position where a step samples: after
the last token of each row, or after each token if the program verifies drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as made_by
from functools import partial
from itertools import pairwise
from operator import ne
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from jaxllm.metrics import Metrics
from jaxllm.model.sharding import UNDIVIDED
from jaxllm.runner import batch
from jaxllm.runner.batch import TILE, Shape
from jaxllm.runner.compiled_programs import Key, Programs
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.drafting import NO_DRAFT, Drafted
from jaxllm.runner.host_tier import LOAD_PROGRAMS, STORE_PROGRAMS, Copies, HostTier
from jaxllm.runner.model_runner import HeldStep, Runner, StepInFlight
from jaxllm.runner.resident_adapters import ResidentAdapters
from jaxllm.runner.scoring import SCORED_ROWS
from jaxllm.runner.small_programs import COPY_PROGRAMS, SmallPrograms
from jaxllm.runner.step_input import PackedStep
from jaxllm.runner.ticks import Ticks
from jaxllm.sampling.sampler import ROW_WIDTH, Extras, Variant
from jaxllm.scheduler.state import Limits
from jaxllm.setup import draft_setup
from jaxllm.setup.kv_cache import Geometry
from tests.simulation import sources
from tests.simulation.beams import BeamTruth, likeliest
from tests.simulation.media import Rows, has_axes, rotary
from tests.simulation.oracle import NUM_LOGPROBS, VOCABULARY, Truth, logprob, mix

POISON = np.uint64(0xBAD)  # content of the cache after a row without finite numbers
WIDTHS = (2, 2, 4 + 2 * NUM_LOGPROBS, 4 + 2 * NUM_LOGPROBS + 128)  # columns of results, by variant
KEY_AT = 13  # index of the words of a sampling row that hold the seed
VARIANTS = tuple(Variant)
DRAFT_SHARES = (
    256,
    256,
    240,
    208,
    160,
    96,
    0,
    -1,
)  # shares of a request's drafts that are right, in 256ths; -1: no drafts


class Violation(AssertionError):
    """An invariant does not hold, or production differs from the expected behavior."""


class Faults(Protocol):
    """Injects faults into a step, and checks facts that the device cannot see."""

    def before_dispatch(self, shape: Shape) -> None: ...
    def before_sample(self) -> None: ...
    def before_load(self) -> None: ...
    def is_wanted(self, number: int, row: int) -> bool: ...
    def is_late(self, slot: int) -> bool: ...
    def while_in_flight(self, flight: Flight) -> None: ...
    def not_finite(self, samples: Sequence[bool]) -> Sequence[int]: ...
    def strikes_score(self) -> bool: ...
    def unsettled(self, slot: int) -> int: ...
    def check_private(self, slot: int, group: int, written: Collection[int]) -> None: ...
    def check_unshared(self, group: int, block: int) -> None: ...
    def note_verified(self, drafts: int, had: int, count: int) -> None: ...


class Flight:
    """A step's results on their way to the host."""

    def __init__(self, joined: np.ndarray, logits: Logits, device: Device) -> None:
        self.joined = joined
        self._logits = logits
        self._device = device
        self._generation = device.generation

    def copy_to_host_async(self) -> None:
        """Do nothing: the results are in the host's memory."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        if self._generation != self._device.generation:
            raise Violation("a step is waited for whose device was given up")
        self._device.faults.while_in_flight(self)
        self._device.num_chunk_tokens += self._logits.num_chunk_tokens
        for had, kept in self._logits.verified:
            self._device.note_drafts(had, kept)
        return self.joined


@dataclass
class Logits:
    """Results of the first half of a step, for the second half; lists are by place."""

    number: int  # of the step
    num_decodes: int  # places of decode rows
    slots: np.ndarray
    ends: np.ndarray  # positions of the tokens that are sampled
    samples: list[bool]
    owners: list[Truth]
    offsets: list[int]  # from the row's first place
    tokens: list[int]  # the last one before each place
    written: list[np.ndarray]  # indices of these tokens in the cache, by group
    poisoned: set[int]  # places
    num_chunk_tokens: int = 0
    verified: Sequence[tuple[int, int]] = ()  # drafts of each row, and accepted ones


@dataclass
class Batch:
    """The rows of a step on their way through the stages; lists are by place."""

    slots: np.ndarray
    ends: np.ndarray
    token_slots: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    content: np.ndarray  # hashes of the tokens
    num_decodes: int  # places of decode rows
    samples: list[bool]
    offsets: list[int]  # from the row's first place
    owners: list[Truth]
    firsts: list[int]  # first place of each row
    row_slots: np.ndarray
    row_ends: np.ndarray
    expected: np.ndarray  # hashes that the rows must read
    starts: np.ndarray  # of the rows
    astray: dict[int, int]  # as `Device.astray`
    poisoned: set[int] = made_by(default_factory=set)  # places
    written: list[np.ndarray] = made_by(default_factory=list)  # indices of the tokens in the cache, by group


class Device:
    """The memory of a device, and programs over it."""

    def __init__(
        self,
        geometry: Geometry,
        extras: Extras,
        faults: Faults,
        max_drafts: int,
        media: Rows | None,
        num_stages: int = 1,
    ) -> None:
        self.geometry = geometry
        self.num_stages = num_stages
        self.media = media
        self.sources: dict[int, tuple[int, list[int]]] | None = None  # by slot: tokens and blocks
        self.max_drafts = max_drafts
        self.drafting_rows = self.draft_tokens = 0  # in steps whose results were read
        self.accepted_tokens: list[int] = []
        self.truths: dict[int, Truth] = {}  # by seed
        self.extras = extras
        self.faults = faults
        self.num_steps = self.num_tokens = self.generation = self.num_copied = 0
        self.sampling = 0  # the number of the plan whose second half is dispatched
        self.num_chunk_tokens = 0  # of prompts, in steps whose results were read
        size, longest = geometry.block_size, geometry.max_blocks * geometry.block_size
        positions = np.arange(longest)
        self._block_of, self._offset_of = positions // size, positions % size
        self._positions = positions
        self.renew()

    def renew(self) -> None:
        """Reset all memory, as after a failed step that had donated the state."""
        geometry = self.geometry
        slots, longest = geometry.num_slots, geometry.max_blocks * geometry.block_size
        self.is_lost = False
        if self.media is not None:
            self.media.renew()
        if self.sources is not None:
            self.sources.clear()
        self.generation += 1
        groups = range(geometry.num_groups)
        # The pipeline's batches, the newest first; caches and block tables of all stages, one after the other.
        self.passing: list[Batch | None] = [None] * self.num_stages
        self._sizes = [geometry.array_blocks(group) * geometry.block_size for group in groups]
        self.content = [np.zeros(self.num_stages * size, np.uint64) for size in self._sizes]
        # Entries of windowed layers that were never written name block 0, so that a read of it fails.
        self.tables = np.zeros((self.num_stages * slots, geometry.max_blocks * len(groups)), np.int32)
        self.tables[:, :: len(groups)] = geometry.num_blocks
        self.tokens = np.full((slots, longest + 2), -1, np.int32)
        self.rows = np.zeros((slots, ROW_WIDTH), np.int32)
        self.slot_extras = np.zeros((slots, self.extras.width), np.int32)
        self.hidden = np.zeros(0, np.uint64)
        self.lengths = np.zeros(slots, np.int32)
        self.drafts = np.zeros((slots, self.max_drafts), np.int32)
        self.owners: list[Truth | None] = [None] * slots
        self._with_extras: list[Truth | None] = [None] * slots  # owners whose extras were checked
        self.astray: dict[int, int] = {}  # by slot: position of a token that was sampled without its late mask
        self._versions = [-1] * slots  # of the owners
        # Hashes and tokens of the owners, as far as they are computed:
        self._chains = np.zeros((slots, longest + 2), np.uint64)
        self._truths = np.full((slots, longest + 2), -1, np.int32)

    @property
    def leaves(self) -> tuple[np.ndarray, ...]:
        """The state in the order of `DeviceState`."""
        drafted = (self.lengths, self.drafts) if self.max_drafts else ()
        return *drafted, self.tables, self.tokens, self.rows, self.slot_extras, self.hidden

    def note_drafts(self, had: int, kept: int) -> None:
        """Count the drafts of a row whose result was read."""
        self.drafting_rows += had > 0
        self.draft_tokens += had
        for place in range(kept):
            if place == len(self.accepted_tokens):
                self.accepted_tokens.append(0)
            self.accepted_tokens[place] += 1

    def program(self, key: Key) -> Callable[..., tuple[Any, Any]]:
        """Return the program of a key: a step in one shape, or a half of a step."""
        shape = key.shape
        variant = -1 if key.variant is None else VARIANTS.index(key.variant)

        def forward(params: Any, state: Any, buffer: np.ndarray, *adapters: tuple[int, ...]) -> tuple[Any, Logits]:
            self.faults.before_dispatch(shape)
            self._check_state()
            if len(buffer) != batch.sent_size(shape, self.num_stages):
                raise Violation("I12: the buffer is not one of the program's")
            starts = range(0, self.num_stages * batch.stride(shape), batch.stride(shape))
            fields = [batch.views(buffer[start:], batch.fields(shape)) for start in starts]
            field = fields[-1]
            if len(adapters) != shape.adapters:
                raise Violation("a program gets another number of adapters than it takes")
            logits = self._forward(shape, fields, [adapter[0] if adapter else 0 for adapter in adapters])
            if not shape.is_decode:
                num_tokens = np.count_nonzero(field["token_slot"] < self.geometry.num_slots)
                logits.num_chunk_tokens = int(num_tokens - field["num_decodes"][0])
            return state, logits

        def run(params: Any, state: Any, buffer: np.ndarray, *adapters: tuple[int, ...]) -> tuple[Any, Flight]:
            state, logits = forward(params, state, buffer, *adapters)
            return state, Flight(self._sample(shape, variant, logits, None), logits, self)

        def sample(
            tokens: np.ndarray, sampling: np.ndarray, extras: np.ndarray, logits: Logits, masks: np.ndarray
        ) -> tuple[np.ndarray, Flight]:
            if tokens is not self.tokens or sampling is not self.rows or extras is not self.slot_extras:
                raise Violation("the second half of a step is given something else for the state")
            return tokens, second(logits, masks)

        def finish(
            params: Any, state: Any, buffer: np.ndarray, logits: Logits, masks: np.ndarray
        ) -> tuple[Any, Flight]:
            if any(map(ne, map(id, state[:-1]), map(id, self.leaves))) or len(buffer) != batch.buffer_size(shape):
                raise Violation("the second half of a step is given something else for the state or the batch")
            return state, second(logits, masks)

        def second(logits: Logits, masks: np.ndarray) -> Flight:
            self.faults.before_sample()
            self._check_state()
            words = self._read_masks(shape.rows, logits, masks)
            return Flight(self._sample(shape, variant, logits, words), logits, self)

        return {"step": run, "forward": forward, "sample": sample, "finish": finish}[key.part]

    def patch(self, tables: np.ndarray, tokens: np.ndarray, changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write the entries of block tables and the tokens that do not fit into the buffer of a step."""
        self._check_state()
        for target, change in ((self.tables, changes[0]), (self.tokens, changes[1])):
            change = change[change[:, 0] < len(target)]
            target[change[:, 0], change[:, 1]] = change[:, 2]
        return tables, tokens

    def patch_extras(self, extras: np.ndarray, changes: np.ndarray) -> np.ndarray:
        """Write the extras of slots."""
        self._check_state()
        for change in changes[changes[:, 0] < self.geometry.num_slots]:
            self.slot_extras[change[0]] = change[1:]
            self._with_extras[change[0]] = None
        return extras

    def score(self, params: Any, hidden: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return log-probabilities of prompt tokens after positions of the previous step."""
        joined = np.zeros((SCORED_ROWS, 4 + 2 * NUM_LOGPROBS), np.int32)
        wanted = [(index, token) for index, token in places.tolist() if token]  # no prompt holds token 0
        chains = [int(self.hidden[index]) if index < len(self.hidden) else 0 for index, _ in wanted]
        _fill_logprobs(joined, chains, [token for _, token in wanted])
        if wanted and self.faults.strikes_score():
            joined[: len(wanted), 2] = np.float32(np.nan).view(np.int32)
            for index, _ in wanted:
                owner = self.owners[self._hidden_slots[index]]
                assert owner is not None
                owner.may_fail = True
        return joined

    def _check_state(self) -> None:
        if self.is_lost:
            raise Violation("a program was given a state that is gone")

    def _forward(self, shape: Shape, fields: Sequence[Mapping[str, np.ndarray]], adapters: Sequence[int]) -> Logits:
        """Take in the newest batch, compute one in each stage, and return the places of the oldest.

        `fields` has those of each batch; `adapters` the contents of the adapter arguments.
        """
        self.num_steps += 1
        self.passing = [self._enter(shape, fields[0], adapters), *self.passing[:-1]]
        for stage, (own, field) in enumerate(zip(self.passing, fields, strict=True)):
            slots = field["row_slot"]
            slots = slots[slots < self.geometry.num_slots].tolist()
            self._write_tables(field["table"], stage)
            if own is None or not slots:  # the host has dropped the batch
                self.passing[stage] = own = None
            if (own.slots.tolist() if own is not None else []) != slots:
                raise Violation("a stage computes another batch than that which the stage before passes on")
            if own is not None:
                self._compute(shape, own, stage)
        return self._leave(shape, self.passing[-1], fields[-1])

    def _write_tables(self, table: np.ndarray, stage: int) -> None:
        geometry = self.geometry
        table = table[: np.count_nonzero(table[:, 0] < geometry.num_slots)]
        for slot, index, block in table.tolist():
            if slot < 0 or index < 0 or not 0 <= block < geometry.array_blocks(index % geometry.num_groups):
                raise Violation("a block that does not exist")
            self.tables[stage * geometry.num_slots + slot, index] = block

    def _enter(self, shape: Shape, field: Mapping[str, np.ndarray], adapters: Sequence[int]) -> Batch | None:
        """Read the tokens of a batch and compute their hashes; return None for one without rows."""
        num_slots = self.geometry.num_slots
        slots = field["row_slot"]
        num_places = int(np.count_nonzero(slots < num_slots))
        if not num_places:
            return None
        slots = slots[:num_places]
        ends = field["row_position"][:num_places] + 1
        offsets = [0] * num_places
        if shape.is_decode:
            token_slots, samples, num_decodes = slots, [True] * num_places, num_places
            if shape.drafts:
                offsets = self._read_rows(shape, field, slots, ends)
            if self.max_drafts:
                ends = self._begin(slots, ends, offsets)
            positions = ends - 1
            tokens = self.tokens[slots, positions]
        else:
            num_decodes = int(field["num_decodes"][0])
            token_slots, positions, tokens, ends = self._read_ragged(field, slots, ends)
            samples = (field["row_samples"][:num_places] > 0).tolist()
        slot_list = slots.tolist()
        owners = [self.owners[slot] for slot in slot_list]
        for slot, owner in zip(slot_list, owners, strict=True):
            if owner is not None and owner.version != self._versions[slot]:
                self._versions[slot] = owner.version
                self._chains[slot], self._truths[slot] = 0, -1
                self._chains[slot, : owner.length] = owner.chain[: owner.length]
                self._truths[slot, : owner.length] = owner.tokens[: owner.length]

        if adapters:
            self._check_adapters(field["token_adapter"][: len(token_slots)], token_slots, adapters)
        elif any(owner is not None and owner.weights for owner in owners):
            raise Violation("a row is computed without its adapter")

        if self.media is not None and not shape.is_decode:
            self._check_media(self.media, field["token_media"], token_slots, positions)
            if shape.looks_ahead:
                chunks = slice(int(field["num_decodes"][0]), None)
                self._check_whole_images(field["token_last_seen"][chunks], token_slots[chunks], positions[chunks])

        if shape.axes:
            self._check_turned(field["turned"], token_slots, positions)

        if self.sources is not None:
            self._check_sources(self.sources, set(slot_list))

        # The content follows from the token and from the sequence before it, which is checked below.
        content = self._chains[token_slots, positions]
        is_wrong = tokens != self._truths[token_slots, positions]
        if any(offsets):
            self._put_drafts(slots, positions, offsets, tokens, content)
            is_wrong &= np.array(offsets) == 0
        astray = self._follow_astray(token_slots, positions, tokens, content, is_wrong) if self.astray else []
        if np.count_nonzero(is_wrong):
            raise Violation("a row holds tokens that are not its request's")
        firsts = [place for place, offset in enumerate(offsets) if not offset]
        row_slots, row_ends = (slots, ends) if len(firsts) == num_places else (slots[firsts], ends[firsts])
        return Batch(
            slots=slots,
            ends=ends,
            token_slots=token_slots,
            positions=positions,
            tokens=tokens,
            content=content,
            num_decodes=num_decodes,
            samples=samples,
            offsets=offsets,
            owners=[owner for owner in owners if owner is not None],
            firsts=firsts,
            row_slots=row_slots,
            row_ends=row_ends,
            expected=self._chains[row_slots, : int(row_ends.max())],
            starts=row_ends - (1 if shape.is_decode else np.diff(field["row_last"][:num_places], prepend=-1)),
            astray={slot: self.astray[slot] for slot in astray},
        )

    def _compute(self, shape: Shape, own: Batch, stage: int) -> None:
        """Write the tokens of a batch into a stage's cache, then check the content that its rows read."""
        geometry = self.geometry
        size, token_slots, positions = geometry.block_size, own.token_slots, own.positions
        tables = self.tables[stage * geometry.num_slots :][: geometry.num_slots]
        slot_list, offsets = own.slots.tolist(), own.offsets
        own.written = []
        for group, num_blocks in enumerate((geometry.num_blocks, geometry.num_window_blocks)[: geometry.num_groups]):
            held = self.content[group][stage * self._sizes[group] :][: self._sizes[group]]
            places = tables[token_slots, positions // size * geometry.num_groups + group] * size + positions % size
            place_list = places.tolist()
            if max(place_list) >= num_blocks * size:
                raise Violation("a row has no block for its token")
            if len(set(place_list)) < len(place_list):
                raise Violation("I4: two tokens are written to one place")
            held[places] = own.content
            own.written.append(places + stage * self._sizes[group])
            if shape.drafts:
                for slot in {slot for slot, offset in zip(slot_list, offsets, strict=True) if offset}:
                    self.faults.check_private(slot, group, set((places[own.slots == slot] // size).tolist()))

        # Read: every position of every row. The positions that only drafts read were written by this step.
        longest = own.expected.shape[1]
        for group in range(geometry.num_groups):
            held = self.content[group][stage * self._sizes[group] :][: self._sizes[group]]
            blocks = tables[own.row_slots][:, self._block_of[:longest] * geometry.num_groups + group]
            found = held.take(blocks * size + self._offset_of[:longest], mode="clip")
            wrong = found != own.expected
            if len(own.firsts) > 1:
                wrong &= self._positions[:longest] < own.row_ends[:, None]
            for slot, position in own.astray.items():
                wrong[own.row_slots == slot, position] = False
            if group:  # before the window, where weights are 0, the block of zeros is allowed
                is_nothing = (blocks == geometry.num_window_blocks) & (found == 0)
                wrong &= ~(is_nothing & (self._positions[:longest] <= (own.starts - geometry.window)[:, None]))
            if np.count_nonzero(wrong):
                for row in wrong.any(1).nonzero()[0].tolist():
                    if (found[row][wrong[row]] != POISON).any():
                        raise Violation(f"I3: slot {own.row_slots[row]} reads a place that holds something else")
                    own.poisoned.add(own.firsts[row])  # by a failed row, which the host has not seen yet

    def _leave(self, shape: Shape, own: Batch | None, field: Mapping[str, np.ndarray]) -> Logits:
        """Write the tokens and parameters of a batch that is sampled now; return its places."""
        if own is None:
            return Logits(self.num_steps, 0, np.zeros(0, np.int32), np.zeros(0, np.int32), [], [], [], [], [], set())
        chunks = slice(own.num_decodes, None)
        last: Any = slice(None)
        if not shape.is_decode:
            last = field["row_last"][: len(own.slots)]
            self.rows[own.slots] = field["sampling"][: len(own.slots)]
            self.tokens[own.token_slots[chunks], own.positions[chunks]] = own.tokens[chunks]
        self.hidden, self._hidden_slots = own.content, own.token_slots
        self.num_tokens += len(own.content)
        return Logits(
            number=self.num_steps,
            num_decodes=own.num_decodes,
            slots=own.slots,
            ends=own.ends,
            samples=own.samples,
            owners=own.owners,
            offsets=own.offsets,
            tokens=own.tokens[last].tolist(),
            written=[places[last] for places in own.written],
            poisoned=own.poisoned,
        )

    def _read_rows(
        self, shape: Shape, field: Mapping[str, np.ndarray], slots: np.ndarray, ends: np.ndarray
    ) -> list[int]:
        """Check the rows of a program that verifies drafts; return the offset of each place in its row."""
        offsets, drafts = (field[name][: len(slots)].tolist() for name in ("row_offset", "row_drafts"))
        bounds = ends.tolist()
        rows: list[int] = []
        place = 0
        while place < len(offsets):
            row = slice(place, place + 1 + drafts[place])
            following = list(range(1 + drafts[place]))
            if (
                not 0 <= drafts[place] <= shape.drafts
                or offsets[row] != following
                or len(set(drafts[row])) > 1
                or len(set(slots[row].tolist())) > 1
                or bounds[row] != [bounds[place] + offset for offset in following]
            ):
                raise Violation("drafts do not lie behind the token of their row")
            rows.append(int(slots[place]))
            place = row.stop
        if len(set(rows)) < len(rows) or len(rows) > shape.rows:
            raise Violation("a slot has two rows, or the program fewer than its plan")
        return offsets

    def _begin(self, slots: np.ndarray, bounds: np.ndarray, offsets: Sequence[int]) -> np.ndarray:
        """Return the lengths of decode rows from the device; the host's `bounds` may count drafts in flight on top."""
        ends = self.lengths[slots] + np.array(offsets, np.int32)
        for slot, slack in zip(slots.tolist(), (bounds - ends).tolist(), strict=True):
            if slack and not 0 < slack <= self.faults.unsettled(slot):
                raise Violation(f"the host takes slot {slot} for {slack} tokens longer than it is")
        return ends

    def _put_drafts(
        self, slots: np.ndarray, positions: np.ndarray, offsets: Sequence[int], tokens: np.ndarray, content: np.ndarray
    ) -> None:
        """Write the drafts of slots into a step's tokens, and their hashes into `content`."""
        for place, offset in enumerate(offsets):
            if offset:
                token = max(int(self.drafts[slots[place], offset - 1]), 0)
                tokens[place] = self.tokens[slots[place], positions[place]] = token
                content[place] = mix(int(content[place - 1]), token)

    def _propose(self, owner: Truth, length: int) -> list[int]:
        """Return drafts after `length` tokens: right ones, wrong ones or none, in shares that depend on the request."""
        share = DRAFT_SHARES[mix(owner.seed % 2**64, 3) >> 20 & 7]
        drafts: list[int] = []
        owner.ensure(min(length + self.max_drafts, owner.limit))
        for at in range(length, length + self.max_drafts):
            token = int(owner.tokens[at]) if at < owner.limit else 2
            draw = mix(owner.seed % 2**64, at) >> 20 & 255
            drafts.append(token if draw < share else NO_DRAFT if share < 0 or draw % 4 == 0 else token ^ 1)
        return drafts

    def _follow_astray(
        self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, content: np.ndarray, is_wrong: np.ndarray
    ) -> list[int]:
        """Compute the content of tokens that were sampled without their masks; return the slots with such a token."""
        rows = {slot: row for row, slot in enumerate(slots.tolist())}
        for slot, row in rows.items():
            if self.astray.get(slot, -1) == positions[row]:
                content[row] = mix(int(self._chains[slot, positions[row] - 1]), int(tokens[row]))
                is_wrong[row] = False
            else:
                self.astray.pop(slot, None)
        return [slot for slot in self.astray if slot in rows]

    def _check_adapters(self, chosen: np.ndarray, token_slots: np.ndarray, adapters: Sequence[int]) -> None:
        """Check that each token of a step is computed with the adapter of its request."""
        weights = [*adapters, 0]
        if not all(0 <= index < len(weights) for index in chosen.tolist()):
            raise Violation("a token has an adapter that the step was not given")
        for slot, index in set(zip(token_slots.tolist(), chosen.tolist(), strict=True)):
            owner = self.owners[slot]
            if owner is not None and owner.weights != weights[index]:
                raise Violation(f"slot {slot} is computed with the adapter of another")

    def _check_media(self, media: Rows, chosen: np.ndarray, token_slots: np.ndarray, positions: np.ndarray) -> None:
        """Check that each placeholder of an image is replaced by its embedding, and no other token."""
        if (chosen[len(token_slots) :] != media.num_rows).any():
            raise Violation("a token of padding has an embedding")
        for slot, position, row in zip(*(each.tolist() for each in (token_slots, positions, chosen)), strict=False):
            owner = self.owners[slot]
            due = None if owner is None else owner.images.get(position)
            if (due is None) != (row == media.num_rows) or (due is not None and int(media.rows[row]) != due):
                raise Violation(f"position {position} of slot {slot} has another embedding than is due")

    def _check_turned(self, turned: np.ndarray, token_slots: np.ndarray, positions: np.ndarray) -> None:
        """Check the rotary positions of a step's tokens; a device that drafts adds positions."""
        found = turned[:, : len(token_slots)] + (positions if self.max_drafts else 0)
        for slot, position, own in zip(token_slots.tolist(), positions.tolist(), found.T.tolist(), strict=True):
            owner = self.owners[slot]
            if owner is not None and own != rotary(owner.pictures, position)[: len(own)]:
                raise Violation(f"position {position} of slot {slot} has other rotary positions than are due")

    def _check_sources(self, placed: Mapping[int, tuple[int, list[int]]], slots: Collection[int]) -> None:
        """Check that each row reads the source of its request."""
        size = self.geometry.block_size
        for slot in slots:
            owner = self.owners[slot]
            if owner is None:
                continue
            assert owner.source is not None
            length, blocks = placed.get(slot, (0, []))
            if length != owner.source[1] or len(blocks) != -(-length // size):
                raise Violation(f"slot {slot} reads a source of {length} tokens, where {owner.source} is due")
            for index, block in enumerate(blocks):
                found = self.content[0][block * size : (block + 1) * size]
                if (found != sources.content(owner.source, size, index)).any():
                    raise Violation(f"slot {slot} reads a block of another source than {owner.source}")

    def _check_whole_images(self, last_seen: np.ndarray, token_slots: np.ndarray, positions: np.ndarray) -> None:
        """Check that chunks have whole images, whose tokens see all of them; other tokens see to themselves."""
        ends = dict(zip(token_slots.tolist(), positions.tolist(), strict=True))  # the last one of each slot
        for slot, position, seen in zip(*(each.tolist() for each in (token_slots, positions, last_seen)), strict=False):
            owner = self.owners[slot]
            if owner is None:
                continue
            due = owner.last_places.get(position, position)
            if seen != due:
                raise Violation(f"position {position} of slot {slot} sees to {seen}, where {due} is due")
            if due > ends[slot]:
                raise Violation(f"a chunk of slot {slot} ends inside an image, at {ends[slot]}")

    def _read_masks(self, num_rows: int, logits: Logits, buffer: np.ndarray) -> list[int | None]:
        """Check that the buffer of a second half fits its first half; return the mask of each row, or None."""
        if logits.number != self.num_steps:
            raise Violation("a step came between the halves of another")
        columns, used = len(batch.MASK_COLUMNS), len(logits.slots)
        if buffer.shape != (num_rows, columns + VOCABULARY // 32):
            raise Violation("I12: the buffer is not one of the program's")
        slot, position, samples, is_masked = buffer[:, :columns].T
        # With drafts, the host's positions of decode rows are bounds.
        first = logits.num_decodes if self.max_drafts else 0
        positions = (logits.ends - 1).tolist()[first:]
        if (
            slot[:used].tolist() != logits.slots.tolist()
            or (slot[used:] < self.geometry.num_slots).any()
            or position[first:used].tolist() != positions
            or (samples[:used] > 0).tolist() != logits.samples
        ):
            raise Violation("the halves of a step have different rows")
        words = np.ascontiguousarray(buffer[:used, columns:]).view(np.uint64)[:, 0].tolist()
        return [word if has_mask else None for word, has_mask in zip(words, is_masked.tolist(), strict=False)]

    def _sample(self, shape: Shape, variant: int, logits: Logits, masks: list[int | None] | None) -> np.ndarray:
        """Sample the places of a step; `masks` is None for a step of one program, which needs no masks."""
        joined = np.zeros((shape.sampled, WIDTHS[variant] + 2 * bool(shape.drafts)), np.int32)
        joined[: len(logits.slots), 1] = 1
        struck = {*self.faults.not_finite(logits.samples), *logits.poisoned}
        counts: dict[int, int] = {}  # number of tokens that a row yields, by its first place
        for place, offset in enumerate(logits.offsets):
            if offset and place - 1 in struck:
                struck.add(place)  # it reads the content of the place before
        first = 0
        rows = zip(logits.slots.tolist(), logits.owners, logits.ends.tolist(), strict=True)
        for row, (slot, owner, end) in enumerate(rows):
            offset = logits.offsets[row]
            if not offset:
                first, counts[row] = row, int(logits.samples[row])
            if not logits.samples[row]:
                continue
            if end < owner.num_prompt:
                raise Violation("a row samples inside its prompt")
            if end > owner.limit or (offset and end == owner.limit):
                raise Violation("a row samples beyond its limit")
            if owner.variant > variant:
                raise Violation("a program samples less widely than its row needs")
            if isinstance(owner, BeamTruth):
                self.tokens[slot, end] = -1  # the host chooses the token, and must send it
                self._fill_likeliest(joined[row], int(owner.chain[end - 1]))
                continue
            owner.ensure(end + 1)
            token = int(owner.tokens[end])
            if offset:
                is_kept = counts[first] == offset and self._truths[slot, end - 1] == self.drafts[slot, offset - 1]
                if not is_kept or row in struck:
                    joined[row, 0] = mix(int(owner.chain[end - 1]), end) % VOCABULARY  # any token, after a wrong one
                    continue
                counts[first] += 1
            mask = None if masks is None else masks[row]
            if owner.is_constrained:
                is_wanted = masks is None or self.faults.is_wanted(self.sampling, row)
                if is_wanted and slot in self.astray:
                    raise Violation("the result of a row is wanted that continues a token sampled without a mask")
                if not is_wanted or (mask is None and self.faults.is_late(slot)):
                    if is_wanted:
                        self.astray[slot] = end
                    self.tokens[slot, end] = joined[row, 0] = (token + 1) % VOCABULARY  # any wrong token
                    continue
                joined[row, 1] = _check_mask(owner, end, mask)
            elif mask is not None:
                raise Violation("a row has a mask and no grammar")
            self.tokens[slot, end] = joined[row, 0] = token
            if self.num_stages == 1 or self.faults.is_wanted(self.sampling, row):
                if self.rows[slot].tobytes() != owner.row_bytes:
                    raise Violation("a row is sampled with the parameters of another request")
                if owner.variant == 3:
                    self._check_full(slot, owner, end)
            if self.owners[slot] is owner:  # else the slot was given to another since
                self._truths[slot, end], self._chains[slot, end] = token, owner.chain[end]
            if owner.params.logprobs is not None:
                _fill_logprobs(joined[row : row + 1], [int(owner.chain[end - 1])], [token])
        for row in struck:
            logits.owners[row].may_fail = True
            joined[row, 1] = 0
            joined[row, 0] = -1
            for held, written in zip(self.content, logits.written, strict=True):
                held[written[row]] = POISON
        for row, count in counts.items():
            self.lengths[logits.slots[row]] = logits.ends[row] + count
        if shape.drafts:
            self._finish_drafts(joined, logits, counts)
        return joined

    def _finish_drafts(self, joined: np.ndarray, logits: Logits, counts: Mapping[int, int]) -> None:
        """Write the numbers of tokens and drafts of each row into `joined`, and draft for the next step."""
        joined[:, -2:] = -9  # except for the first place of a row, no result
        firsts = [*counts, len(logits.offsets)]
        verified = []
        for row, following in pairwise(firsts):
            slot, drafts = logits.slots[row], following - row - 1
            had = int((self.drafts[slot, :drafts] != NO_DRAFT).sum())
            joined[row, -2:] = counts[row], had
            verified.append((had, counts[row] - 1))
            if drafts:
                self.faults.note_verified(drafts, had, counts[row])
            self.drafts[slot] = self._propose(logits.owners[row], int(self.lengths[slot]))
        logits.verified = verified

    def _fill_likeliest(self, joined: np.ndarray, chain: int) -> None:
        """Write the columns of the likeliest tokens after a sequence."""
        tokens, logprobs = likeliest(chain)
        joined[4 : 4 + NUM_LOGPROBS] = np.array(logprobs[:NUM_LOGPROBS], np.float32).view(np.int32)
        joined[4 + NUM_LOGPROBS : 4 + 2 * NUM_LOGPROBS] = tokens[:NUM_LOGPROBS]

    def copy_blocks(self, kv: tuple[()], places: np.ndarray, group: int = 0) -> tuple[()]:
        """Copy blocks of a group's layers; numbers beyond the last block are padding."""
        self._check_state()
        copies = places[places[:, 1] < self.num_stages * self.geometry.array_blocks(group)]
        sources, targets = copies.T.tolist()
        if len(set(targets)) < len(targets) or {*sources} & {*targets}:
            raise Violation("a block is copied onto twice, or both from and onto")
        blocks = self.content[group].reshape(self.num_stages * self.geometry.array_blocks(group), -1)
        blocks[targets] = blocks[sources]
        self.num_copied += len(copies)
        return kv

    def read_blocks(self, kv: tuple[()], blocks: np.ndarray, group: int = 0) -> list[tuple[np.ndarray]]:
        """Return the content of blocks of a group's layers."""
        self._check_state()
        held = self.content[group].reshape(self.geometry.array_blocks(group), -1)
        return [(held[block].copy(),) for block in blocks.tolist()]

    def write_blocks(
        self, kv: tuple[()], blocks: np.ndarray, rows: Sequence[tuple[np.ndarray]], group: int = 0
    ) -> tuple[()]:
        """Write blocks of a group's layers; numbers beyond the last block are padding."""
        self.faults.before_load()
        self._check_state()
        targets = [block for block in blocks.tolist() if block < self.geometry.array_blocks(group)]
        if len(set(targets)) < len(targets) or self.geometry.num_window_blocks in (targets if group else ()):
            raise Violation("a block is loaded into twice, or into that of zeros")
        held = self.content[group].reshape(self.geometry.array_blocks(group), -1)
        for block, (row,) in zip(blocks.tolist(), rows, strict=True):
            if block in targets:
                self.faults.check_unshared(group, block)
                held[block] = row
        return kv

    def _read_ragged(
        self, field: Mapping[str, np.ndarray], slots: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Check a ragged step; return the slot, position and value of each of its tokens, and the ends of its rows."""
        num_slots, num_rows = self.geometry.num_slots, len(slots)
        num_tokens = int(np.count_nonzero(field["token_slot"] < num_slots))
        num_decodes = int(field["num_decodes"][0])
        token_slots = field["token_slot"][:num_tokens]
        positions = field["token_position"][:num_tokens]
        due_slots: list[int] = []
        due_positions: list[int] = []
        last = -1
        rows = list(zip(slots.tolist(), ends.tolist(), field["row_last"].tolist(), strict=False))
        for number, (slot, end, at) in enumerate(rows):
            due_slots += [slot] * (at - last)
            due_positions += range(end - (at - last), end)
            if number < num_decodes and at != number:
                raise Violation("a decode row has more than its token")
            last = at
        if token_slots.tolist() != due_slots or positions.tolist() != due_positions:
            raise Violation("rows and tokens of a buffer do not belong together")
        at = num_decodes
        names = ("tile_slot", "tile_start", "tile_length", "tile_position")
        for slot, start, length, position in zip(*(field[name].tolist() for name in names), strict=True):
            if slot >= num_slots:
                break
            if (
                not 0 < length <= TILE
                or start != at
                or due_slots[start : start + length] != [slot] * length
                or due_positions[start] != position
            ):
                raise Violation("a tile is not what attends together")
            at += length
        if at != num_tokens:
            raise Violation("tiles do not cover the chunks of prompts")
        new = field["sampling"][:num_rows]
        for (slot, _, _), row, key in zip(rows, new, new[:, KEY_AT : KEY_AT + 2].view(np.uint32).tolist(), strict=True):
            truth = self.truths.get(key[0] << 32 | key[1])
            if truth is None or truth.row_bytes != row.tobytes():
                raise Violation("a slot's sampling row is no living request's")
            if self.owners[slot] is not truth:
                self.owners[slot] = truth
                self.astray.pop(slot, None)
                self._versions[slot] = -1
                self._chains[slot] = 0
                self._truths[slot] = -1
            if not self._chains[slot, truth.length - 1]:
                self._chains[slot, : truth.length] = truth.chain[: truth.length]
                self._truths[slot, : truth.length] = truth.tokens[: truth.length]
        tokens = field["tokens"][:num_tokens].copy()
        if num_decodes:
            if self.max_drafts:
                begun = self._begin(slots[:num_decodes], ends[:num_decodes], [0] * num_decodes)
                positions = np.concatenate([begun - 1, positions[num_decodes:]])
                ends = np.concatenate([begun, ends[num_decodes:]])
            tokens[:num_decodes] = self.tokens[token_slots[:num_decodes], positions[:num_decodes]]
        return token_slots, positions, tokens, ends

    def _check_full(self, slot: int, owner: Truth, end: int) -> None:
        """Check the inputs of the widest variant only: the sequence so far, and the extras."""
        if owner.reads_history and not np.array_equal(self.tokens[slot, :end], owner.tokens[:end]):
            raise Violation("the device does not know the sequence that penalties need")
        if not owner.has_extras or self._with_extras[slot] is owner:
            return
        params = owner.params
        part = {
            name: self.slot_extras[slot, at : at + int(np.prod(size))].reshape(size)
            for name, (at, size) in self.extras.fields.items()
        }
        bias = params.logit_bias or {}
        ids, values = part["bias"][:, : len(bias)]
        found = dict(zip(ids.tolist(), values.view(np.float32).tolist(), strict=True))
        allowed = part["allowed"].view(np.uint32)
        ids = [token for token in range(VOCABULARY) if allowed[token // 32] >> np.uint32(token % 32) & 1]
        if found != bias or (params.allowed_token_ids is not None and ids != sorted(params.allowed_token_ids)):
            raise Violation("a slot's extras are not its request's")
        self._with_extras[slot] = owner


def _check_mask(owner: Truth, end: int, mask: int | None) -> bool:
    """Check the mask of a row whose result is wanted; return whether it allows a token."""
    due = 0 if owner.has_lost_grammar else owner.masks[end - owner.num_prompt]
    if mask is None:
        raise Violation("a row that obeys a grammar is sampled without a mask")
    if mask != due:
        raise Violation(f"a row has the mask {mask:016x}, where {due:016x} is due")
    return not owner.has_lost_grammar and (owner.fails_at is None or end < owner.fails_at)


def _fill_logprobs(joined: np.ndarray, chains: list[int], tokens: list[int]) -> None:
    """Write the columns of log-probabilities: the token's, its rank, the likeliest tokens', their ids."""
    for row, (chain, token) in enumerate(zip(chains, tokens, strict=True)):
        joined[row, 2] = np.float32(logprob(chain, token)).view(np.int32)
        joined[row, 3] = 1 + chain % NUM_LOGPROBS
        ids = [(chain + number) % VOCABULARY for number in range(NUM_LOGPROBS)]
        joined[row, 4 : 4 + NUM_LOGPROBS] = np.array([logprob(chain, each) for each in ids], np.float32).view(np.int32)
        joined[row, 4 + NUM_LOGPROBS : 4 + 2 * NUM_LOGPROBS] = ids


class SimulatedRunner(Runner):
    """The production runner over a `Device`; it compiles the covering programs, and others on `compile`."""

    def __init__(
        self,
        config: Any,
        geometry: Geometry,
        max_step_tokens: int,
        metrics: Metrics,
        faults: Faults,
        adapters: ResidentAdapters,
        setting: Mapping[str, Any],
        copies: Copies,
        disk: Any,
    ) -> None:
        self.geometry = geometry
        lookup = config.speculative_config
        self.drafting = None if lookup is None else draft_setup.by_lookup(lookup)
        max_drafts = 0 if self.drafting is None else self.drafting.most
        self._most_verified: int = setting["most_verified"]
        token_cost, self._draft_cost = setting["costs"]
        self.metrics = metrics
        self.extras = Extras(VOCABULARY)
        self.num_logprobs = NUM_LOGPROBS
        self.setup: Any = SimpleNamespace(
            max_num_batched_tokens=max_step_tokens,
            spec=SimpleNamespace(vocab_size=VOCABULARY, has_axes=has_axes(setting)),
            token_cost=token_cost,
            layout=UNDIVIDED,
        )
        self._config = config
        self._running_thread = None
        self.encoder: Any = Rows(setting) if setting["media_units"] else None
        num_stages: int = setting.get("num_stages", 1)
        self.device = Device(geometry, self.extras, faults, max_drafts, self.encoder, num_stages)
        if num_stages > 1:
            num_blocks = [geometry.array_blocks(group) for group in range(geometry.num_groups)]
            self.ticks = Ticks(num_stages, geometry.num_slots, num_blocks)
        self.sources: Any = sources.SourceRows(setting, self.device) if setting["max_source"] else None
        self._params = ()
        self.adapters = adapters
        device = self.device
        shapes = DeviceState(
            kv=(),
            drafted=Drafted(device.lengths, device.drafts) if max_drafts else None,
            batch=None,
            tables=device.tables,
            tokens=device.tokens,
            sampling=device.rows,
            extras=device.slot_extras,
            hidden=device.hidden,
        )
        self._state_shapes = shapes
        self._state = device.leaves
        programs = {"patch": device.patch, "patch_extras": device.patch_extras}
        programs |= {name: partial(device.copy_blocks, group=group) for group, name in enumerate(COPY_PROGRAMS)}
        programs |= {"score": device.score, "score_whole": device.score}
        programs |= {name: partial(device.read_blocks, group=group) for group, name in enumerate(STORE_PROGRAMS)}
        programs |= {name: partial(device.write_blocks, group=group) for group, name in enumerate(LOAD_PROGRAMS)}
        no_leaves = [()] * geometry.num_groups
        self._small = SmallPrograms(programs, shapes, geometry, no_leaves, VOCABULARY)
        self._host = None
        self._disk = disk
        self._tier: dict[str, Any] = {}
        if setting["host_blocks"][0]:
            self._host = HostTier(programs, no_leaves, geometry, copies, metrics, put=list)
            full, windowed = setting["host_blocks"]
            self._tier = {
                "num_host_blocks": full,
                "num_host_window_blocks": windowed,
                "max_stores": setting["max_stores"],
                "swaps": setting["swaps"],
                "stores_prompts": disk is not None,
            }
        verifying = batch.verifying_shapes(self._max_verified, geometry.num_slots, max_drafts) if max_drafts else []
        self.programs = Programs(
            self._with_axes(batch.decode_shapes(geometry.num_slots), 1),
            self._with_media(batch.ragged_shapes(max_step_tokens, geometry.num_slots, geometry.block_size, ROW_WIDTH)),
            lambda key: key,
            metrics,
            max_adapters=self.limits.max_adapters,
            verifying=self._with_axes(verifying, 1),
            drafts=max_drafts > 0,
        )
        for key in self.programs.covering:
            self.compile(key)

    @property
    def limits(self) -> Limits:
        return replace(super().limits, draft_cost=self._draft_cost, **self._tier)

    @property
    def _max_verified(self) -> int:
        return min(super()._max_verified, self._most_verified)

    def compile(self, key: Key) -> None:
        """Make a program ready, as production's background thread does."""
        self.programs._ready[key] = self.device.program(key)

    def run(self, packed: PackedStep) -> StepInFlight | HeldStep:
        self.device.sampling = packed.plan.number
        return super().run(packed)

    def sample(
        self, held: HeldStep, masks: np.ndarray | None = None, is_masked: np.ndarray | None = None
    ) -> StepInFlight:
        self.device.sampling = held.plan.number
        return super().sample(held, masks, is_masked)

    def renew(self) -> None:
        if self._disk is not None:
            self._disk.drop_expected()
        self.device.renew()
        self._state = self.device.leaves

    def close(self) -> None:
        self.programs.close()
