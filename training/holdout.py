"""Which items are kept out of the training text: a fixed hash of the item decides, so it is the same for every seed."""

import zlib


def bucket(key: str, count: int) -> int:
    """Return a number below `count` that depends on the key alone (Python's own hash changes from run to run)."""
    return (zlib.crc32(key.encode()) * 2654435761 >> 7) % count


def is_small(a: int, b: int) -> bool:
    """Return whether one of the two numbers has one digit."""
    return min(a, b) < 10


def sum_held_out(a: int, operator: str, b: int) -> bool:
    """Return whether a sum is kept for the evaluation; a + b and b + a share their fate, so neither gives the other.

    No sum with a number below ten is kept: these are the usual first question, and too few to measure generalisation.
    """
    if is_small(a, b):
        return False
    if operator == "+":
        a, b = min(a, b), max(a, b)
    return bucket(f"sum:{a}{operator}{b}", 10) == 0


def pair_held_out(name: str, age: int) -> bool:
    """Tell whether this name with this age is kept for the evaluation of the JSON turns."""
    return bucket(f"pair:{name}{age}", 10) == 0


def word_held_out(word: str) -> bool:
    """Tell whether spelling this word backwards is kept for the evaluation (spelling it forwards is trained)."""
    return bucket(f"word:{word}", 5) == 0


def summands_held_out(a: int, b: int) -> bool:
    """Tell whether a tool is asked for a + b, or b + a, in the evaluation alone."""
    return bucket(f"summands:{min(a, b)},{max(a, b)}", 10) == 0


def asking_held_out(question: str) -> bool:
    """Tell whether this question about the weather in a city is asked in the evaluation alone."""
    return bucket(f"asking:{question}", 6) == 0
