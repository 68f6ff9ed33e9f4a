"""Which requests run in the next step, with which blocks: pure functions over plain data.

Knows requests by number of tokens, slots and blocks. Knows no text, no device, no clock and no randomness.
"""
