"""The notes of a part: measurements, failures, omissions, and targets.

Written to disk at once, because a part may be ended at any time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Check:
    """The notes of one part."""

    def __init__(self, name: str, folder: Path, seconds: float, is_dry: bool) -> None:
        self.name, self.folder, self.is_dry = name, folder, is_dry
        self._began = time.monotonic()
        self._ends = self._began + seconds
        self.notes = empty()
        self._save()

    @property
    def left(self) -> float:
        """The seconds left to this part."""
        return self._ends - time.monotonic()

    def is_over(self, needs: float, what: str) -> bool:
        """Return whether fewer than `needs` seconds are left; then note `what` as not run."""
        if self.left >= needs:
            return False
        self.not_run(f"{what}: it takes some {needs:.0f} s, and {max(self.left, 0):.0f} of this part are left")
        return True

    def measure(self, **figures: Any) -> None:
        """Note a row of figures; rows of one part with the same names form a table."""
        self.notes["measured"].append(figures)
        self._say("  ".join(f"{name}={_text(value)}" for name, value in figures.items()))

    def fail(self, line: str) -> None:
        """Note a failure."""
        self.notes["failures"].append(line)
        self._say(f"FAILED: {line}")

    def not_run(self, line: str) -> None:
        """Note a check for which no time was left."""
        self.notes["not_run"].append(line)
        self._say(f"not run: {line}")

    def skip(self, line: str) -> None:
        """Note, once, a check that is impossible here, and why."""
        if line in self.notes["skipped"]:
            return
        self.notes["skipped"].append(line)
        self._say(f"skipped: {line}")

    def answer(self, question: str, line: str) -> None:
        """Note a question and its answer."""
        self.notes["answers"].append({"question": question, "answer": line})
        self._say(f"{question} {line}")

    def target(self, what: str, found: float, aim: float, is_least: bool) -> None:
        """Note whether a figure reaches its target; a dry run has no targets."""
        if self.is_dry:
            return
        is_reached = found >= aim if is_least else found <= aim
        state = "reached" if is_reached else "behind"
        self.notes["targets"].append({"what": what, "found": found, "aim": aim, "is_least": is_least, "state": state})
        self._say(f"target {state}: {what}: {found:.3g}, aim {'at least' if is_least else 'at most'} {aim:g}")

    @contextmanager
    def guarded(self, what: str, is_wrong: bool = False) -> Iterator[None]:
        """Continue after an exception: note a failure if it `is_wrong`, else something skipped."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            (self.fail if is_wrong else self.skip)(f"{what}: {type(error).__name__}: {lines[0]:.300}")

    def done(self) -> None:
        """Note that the part is complete."""
        self.notes["status"] = "done"
        self._save()

    def ceilings(self) -> dict[str, float]:
        """Return the machine's measured bytes and operations per second, and other figures of its part."""
        return json.loads((self.folder / "machine.json").read_text())["measured"][0]

    def _say(self, line: str) -> None:
        print(f"[{self.name}] {line}", flush=True)
        self._save()

    def _save(self) -> None:
        self.notes["seconds"] = round(time.monotonic() - self._began, 1)
        target = self.folder / f"{self.name}.json"
        unfinished = target.with_suffix(".part")
        unfinished.write_text(json.dumps(self.notes))
        unfinished.replace(target)


def empty() -> dict[str, Any]:
    """Return the notes of a part that has not begun."""
    lists: dict[str, Any] = {name: [] for name in ("measured", "failures", "not_run", "skipped", "targets", "answers")}
    return {"status": "not finished", "seconds": 0.0, **lists}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
