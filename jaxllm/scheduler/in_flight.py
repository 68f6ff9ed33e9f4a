"""Batches in flight in pipeline stages: a plan's tokens are sampled `Limits.num_ticks` - 1 ticks after its own tick.

A plan is a tick. A row that samples has no further row until a tick has returned its token to the device.
"""

from __future__ import annotations

import numpy as np

from jaxllm.scheduler.state import Batch, StateEditor


def ready(editor: StateEditor) -> list[np.ndarray]:
    """Return the slots of the last `num_ticks` plans that still decode: the first have their tokens, others fly.

    A request that was given tokens computes these, whatever its row in flight yields.
    """
    epochs, decodes = editor.slots.epochs, editor.slots.num_computed >= editor.slots.num_prefill
    return [batch.slots[(epochs[batch.slots] == batch.epochs) & decodes[batch.slots]] for batch in editor.batches]


def passing(editor: StateEditor) -> np.ndarray:
    return np.concatenate(ready(editor)[1:])


def share(editor: StateEditor, decodes: np.ndarray) -> None:
    """Remove rows from `decodes`, bool[S], that should be in the next batches, so that no stage idles.

    Rows can wait for a later tick and not overtake, so this batch gets the least average over this and the next ones.
    Rows that waited go first, then those of low slots.
    """
    slots, now, (returned, *following) = editor.slots, decodes.nonzero()[0], ready(editor)
    sizes = [len(now), *(int(np.count_nonzero(slots.length[each] < slots.limit[each])) for each in following)]
    most = min(-(-sum(sizes[:count]) // count) for count in range(1, len(sizes) + 1))
    has_returned = np.isin(now, returned)
    later = np.concatenate([now[~has_returned], now[has_returned]])[most:]
    decodes[later] = False


def enter(editor: StateEditor, sampled: np.ndarray) -> None:
    """Note the slots that a plan samples, intp[·]."""
    editor.batches = (*editor.batches[1:], Batch(sampled, editor.slots.epochs[sampled]))
