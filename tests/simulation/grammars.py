"""Toy grammars with the interface of `jaxllm.structured_output`; `oracle.Place` defines their masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxllm.errors import UserError
from jaxllm.structured_output.slow_masks import Pace
from jaxllm.structured_outputs_params import StructuredOutputsParams
from tests.simulation.oracle import Place, seed_of

REFUSED = 16  # grammars whose number is a multiple of this cannot be compiled


class Faults(Protocol):
    """Injects faults into grammars."""

    def in_consume(self, constraint: Constraint) -> None: ...
    def before_fill(self) -> None: ...
    def leaves_late(self, place: int) -> bool: ...
    def note_filled(self, num_late: int) -> None: ...


class Constraint:
    """The grammar state of one output, with the interface of `structured_output.constraint.Constraint`."""

    def __init__(self, place: Place, faults: Faults) -> None:
        self.place = place
        self.error: str | None = None
        self.expected: list[int] = []
        self.job = None
        self.again = None
        self.turn = 0.0
        self.pace = Pace()
        self.is_late = False  # the mask of its last row was not ready in time
        self._faults = faults
        self._check()

    @property
    def is_active(self) -> bool:
        return self.place.marker is None

    def fail(self, reason: str) -> None:
        self.error = self.error or reason

    def consume(self, token: int) -> None:
        if self.error is not None:
            return
        self.expected = self.expected[1:]
        self.place = self.place.after(token)
        self._check()
        self._faults.in_consume(self)

    def forced(self) -> list[int]:
        return [] if self.error is not None or not self.is_active else list(self.place.forced)

    def _check(self) -> None:
        if self.place.has_failed:
            self.fail("the toy fails")


class Grammar:
    """A compiled toy grammar."""

    def __init__(self, asked: StructuredOutputsParams, faults: Faults) -> None:
        self._asked = asked
        self._faults = faults

    def begin(self) -> Constraint:
        return Constraint(Place.begin(self._asked), self._faults)


class Grammars:
    """Compiles toy grammars, and fills their masks."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def compile(self, asked: StructuredOutputsParams) -> Grammar:
        if is_refused(asked):
            raise UserError("regex cannot be compiled: a toy", "structured_outputs")
        return Grammar(asked, self._faults)

    def fill(self, wanted: Sequence[tuple[Constraint, int]], masks: np.ndarray, until: float = 0.0) -> list[int]:
        self._faults.before_fill()
        late = []
        for place, (constraint, row) in enumerate(wanted):
            constraint.is_late = self._faults.leaves_late(place)
            if constraint.is_late:
                late.append(row)
                continue
            mask = 0 if constraint.error is not None else constraint.place.allowed()
            if not mask:
                constraint.fail("the toy allows no token here")
            masks[row] = np.array([mask], np.uint64).view(np.int32)
        self._faults.note_filled(len(late))
        return late


def is_refused(asked: StructuredOutputsParams | None) -> bool:
    return asked is not None and seed_of(asked) % REFUSED == 0
