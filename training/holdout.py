"""Decide which items are held out of the training text, by a hash of the item that does not depend on the seed."""

import zlib


def bucket(key: str, count: int) -> int:
    """Return a number below `count` that depends on the key alone (Python's hash differs between runs)."""
    return (zlib.crc32(key.encode()) * 2654435761 >> 7) % count


def is_small(a: int, b: int) -> bool:
    """Return whether one of the two numbers has one digit."""
    return min(a, b) < 10


def sum_held_out(a: int, operator: str, b: int) -> bool:
    """Return whether a sum is held out for the evaluation; a + b and b + a are held out together.

    Sums with a number below ten are never held out: they are the usual first question, and too few to measure
    generalisation.
    """
    if is_small(a, b):
        return False
    if operator == "+":
        a, b = min(a, b), max(a, b)
    return bucket(f"sum:{a}{operator}{b}", 10) == 0


def pair_held_out(name: str, age: int) -> bool:
    """Return whether this name with this age is held out for the evaluation of the JSON turns."""
    return bucket(f"pair:{name}{age}", 10) == 0


def word_held_out(word: str) -> bool:
    """Return whether spelling this word backwards is held out (spelling it forwards is trained)."""
    return bucket(f"word:{word}", 5) == 0


def summands_held_out(a: int, b: int) -> bool:
    """Return whether a + b, and b + a, with a tool is held out for the evaluation."""
    return bucket(f"summands:{min(a, b)},{max(a, b)}", 10) == 0


def asking_held_out(question: str) -> bool:
    """Return whether this question about the weather in a city is held out for the evaluation."""
    return bucket(f"asking:{question}", 6) == 0


def picture_held_out(arrangement: str) -> bool:
    """Return whether pictures with this arrangement of shapes are held out for the evaluation."""
    return bucket(f"picture:{arrangement}", 20) == 0


def phrase_held_out(text: str) -> bool:
    """Return whether this spoken phrase is held out for the evaluation; one of one or two words never is."""
    return text.count(" ") >= 2 and bucket(f"phrase:{text}", 8) == 0
