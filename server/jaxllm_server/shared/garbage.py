"""When the server looks for garbage in cycles: a full collection holds the interpreter for as long as it looks.

It takes 50 ms for half a million objects, and Python begins one whenever their number has grown by a quarter. Here
those that were loaded are left out, and one begins when there are few objects, once in a while whatever there is.
"""

from __future__ import annotations

import asyncio
import gc

_SECONDS = 5.0  # between two looks
_MANY_OBJECTS = 100_000  # with as many, a collection takes some 10 ms (measured)
_PUT_OFF = 12  # looks at most: what is in cycles holds memory
_NEVER = 2**31 - 1


def keep_loaded_objects() -> None:
    """Collect garbage once more and leave what is there now out of later collections."""
    gc.collect()
    gc.freeze()


async def collect() -> None:
    """Run full collections, in place of those that Python would begin, until cancelled."""
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
