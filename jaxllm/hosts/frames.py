"""The leader's messages, besides entries of `replay.recording.Kind`."""

from __future__ import annotations

from enum import IntEnum


class Call(IntEnum):
    """The type of a message; its fields follow."""

    # Plan number, indices of its programs, checksum of the packed batch; inputs that the scheduler lacks: sampling rows
    # and extras by slot, int32 as bytes; tokens (slot, position, token); scored positions.
    STEP = 32
    SAMPLE = 33  # plan number; rows with a mask, their masks (int32)
    RENEW = 34  # allocate the device's state again
    STOP = 35  # reason; "" if planned
    BEAT = 36
