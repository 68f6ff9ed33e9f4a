"""Schedules full garbage collections, during which no other thread of the server runs.

A full collection takes 50 ms with half a million objects, and Python runs one each time their number has grown by a
quarter. The server excludes the objects that exist after loading, and collects when few others exist, at the latest
once a minute.
"""

from __future__ import annotations

import asyncio
import gc

_SECONDS = 5.0  # between two decisions
_MANY_OBJECTS = 100_000  # a collection of them takes some 10 ms (measured)
_PUT_OFF = 12  # intervals at most: garbage in cycles holds memory
_NEVER = 2**31 - 1


def keep_loaded_objects() -> None:
    """Collect garbage, and exclude all objects that exist now from later collections."""
    gc.collect()
    gc.freeze()


async def collect() -> None:
    """Run full collections instead of Python, until cancelled."""
    youngest, young, oldest = gc.get_threshold()
    gc.set_threshold(youngest, young, _NEVER)
    put_off = 0
    try:
        while True:
            await asyncio.sleep(_SECONDS)
            put_off += 1
            if put_off >= _PUT_OFF or len(gc.get_objects(2)) < _MANY_OBJECTS:
                gc.collect()
                put_off = 0
    finally:
        gc.set_threshold(youngest, young, oldest)
