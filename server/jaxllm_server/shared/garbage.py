"""Schedules full garbage collections, which stop all threads: 50 ms with half a million objects.

Python runs one when their number has grown by a quarter; the server excludes objects loaded at the start, and collects
when few others exist, or once a minute.
"""

from __future__ import annotations

import asyncio
import gc

_SECONDS = 5.0
_MANY_OBJECTS = 100_000  # 10 ms to collect (measured)
_PUT_OFF = 12  # intervals without a collection
_NEVER = 2**31 - 1


def keep_loaded_objects() -> None:
    gc.collect()
    gc.freeze()


async def collect() -> None:
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
