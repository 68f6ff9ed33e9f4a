"""Checks of a client's HTTP/2 frames: costs do not depend on how bytes are split, and limits are exact."""

from __future__ import annotations

import random

import pytest

from jaxllm_server.grpc.frames import CALL_PRICE, FRAME_PRICE, PREFACE, FrameCheck, FrameError

MOST = 1000  # bytes of a header block
DATA, HEADERS, RESET, CONTINUATION, END_HEADERS = 0, 1, 3, 9, 4


def frame(kind: int, size: int, flags: int = END_HEADERS) -> bytes:
    return size.to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 1]) + random.Random(size).randbytes(size)


def drawn(draw: random.Random) -> tuple[bytes, int, bool]:
    """Return frames, their cost up to the first refused one, and whether all are accepted."""
    sent, price, block = PREFACE, 0, 0
    for _ in range(draw.randrange(40)):
        kind, flags = draw.choice((DATA, HEADERS, CONTINUATION, CONTINUATION, RESET, 4, 6, 8, 254)), draw.choice((0, 4))
        size = draw.choice(
            (0, 1, 8, 200, 600, MOST, draw.randrange(1 << 20) if kind == DATA else draw.randrange(1 << 14))
        )
        sent += frame(kind, size, flags)
        if kind in (HEADERS, CONTINUATION):
            block = size if kind == HEADERS else block + size
            if block > MOST:
                return sent, price, False
            block = 0 if flags else block
        price += CALL_PRICE if kind in (HEADERS, RESET) else FRAME_PRICE
        price += size if kind != DATA else 0
    return sent, price, True


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_has_the_same_price_and_the_same_verdict(seed: int) -> None:
    draw = random.Random(seed)
    sent, price, is_fine = drawn(draw)
    for longest in (1, 9, 50, 3000, len(sent)):
        check, at, total = FrameCheck(MOST), 0, 0
        try:
            while at < len(sent):
                piece = sent[at : at + (draw.randint(1, longest) if longest < len(sent) else longest)]
                at += len(piece)
                total += check.price(piece)
        except FrameError:
            assert not is_fine
            assert longest > 1 or total == price  # the cost of a refused piece is not returned
        else:
            assert is_fine and total == price and check.has_begun


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_header_block_has_a_bound_and_calls_have_none(number: int) -> None:
    block = frame(HEADERS, MOST - number, 0) + frame(CONTINUATION, 1, 0) * (number - 1)
    FrameCheck(MOST).price(PREFACE + (block + frame(CONTINUATION, 1)) * 100)
    with pytest.raises(FrameError, match="header block"):
        FrameCheck(MOST).price(PREFACE + block + frame(CONTINUATION, 2))
    with pytest.raises(FrameError, match="header block"):
        FrameCheck(MOST).price(PREFACE + block + frame(CONTINUATION, 1, 0) * 2)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1", b"\x16\x03\x01", PREFACE[:-1] + b"x"])
def test_another_protocol_is_refused_as_soon_as_it_shows(sent: bytes) -> None:
    check = FrameCheck(MOST)
    with pytest.raises(FrameError):
        for byte in sent:
            check.price(bytes([byte]))
    assert not check.has_begun
