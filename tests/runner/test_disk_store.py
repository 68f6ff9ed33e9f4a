"""Tests of the files of the disk's tier: checksums, the byte bound, other engines, and kills at random points."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.runner.disk_store import DiskStore

PRINT, OTHER_PRINT = "0123456789abcdef" * 2, "f" * 32
PAGE = 4096
KILLS = 200
# Engines that share a folder of 40 blocks: one writes all the time, others are killed at random points. After each kill
# every file must be a whole block, and the folder within its bound.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from tests.runner.test_disk_store import BOUND, PRINT, check, content, digest_of, occupied, written
from jaxllm.runner.disk_store import DiskStore

def work(seed):
    store, chance = DiskStore(Path(sys.argv[1]), BOUND, PRINT), random.Random(seed)
    while True:
        number = chance.randrange(400)
        store.write(number % 2, digest_of(number), content(number))
        if chance.random() < 0.3:
            store.read(number % 2, digest_of(number), 5000)

def begin(seed):
    child = os.fork()
    if not child:
        try:
            work(seed)
        finally:
            os._exit(1)
    return child

def end(child):
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "it ended before its kill"

chance, lasting, reader = random.Random(7), begin(0), DiskStore(Path(sys.argv[1]), BOUND, PRINT)
try:
    for number in range(int(sys.argv[2])):
        child = begin(1 + number)
        time.sleep(chance.uniform(0.0, 0.02))
        end(child)
        check(reader)
finally:
    end(lasting)
store = DiskStore(Path(sys.argv[1]), BOUND, PRINT)
assert store.used() == occupied(Path(sys.argv[1])) and not (Path(sys.argv[1]) / "unfinished").exists()
print(len(written(store)), "blocks")
"""
BOUND = 40 * 2 * PAGE


def digest_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number: int, size: int = 5000) -> list[np.ndarray]:
    """Return a block's content in two parts."""
    data = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    return [data[: size // 3], data[size // 3 :]]


def written(store: DiskStore) -> list[Path]:
    return sorted(store.folder.glob("*/*"))


def blocks(root: Path) -> list[Path]:
    """Return the files of blocks, while another engine may remove files and folders."""
    found: list[Path] = []
    for folder in root.glob("kv1-*"):
        for part in os.listdir(folder):
            with suppress(FileNotFoundError):
                found += (folder / part / name for name in os.listdir(folder / part))
    return found


def occupied(root: Path) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in blocks(root))


def check(reader: DiskStore) -> None:
    """Compare every block with its content, without the lock; the folder must be within its bound."""
    root = reader.root
    due = {digest_of(number): number for number in range(400)}
    for path in blocks(root):
        number = due[bytes.fromhex(path.name[:64])]
        for _ in range(5):  # the other engine may remove a block before the read, and write it again after it
            found = reader.read(number % 2, digest_of(number), 5000)
            if found is not None or not path.exists():
                break
        else:
            raise AssertionError("a block is damaged")
        assert found is None or np.array_equal(found, np.concatenate(content(number)))
    sizes = []
    for path in (*blocks(root), root / "unfinished"):
        try:
            sizes.append(-(-path.stat().st_size // PAGE) * PAGE)
        except FileNotFoundError:  # the other engine has removed it
            continue
    assert sum(sizes) <= BOUND + 2 * PAGE  # a file may count as unfinished and as a block


@pytest.mark.ci
def test_a_kill_at_any_point_leaves_whole_blocks_within_the_bound(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(KILLS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "blocks" in found.stdout and "KV block" not in found.stderr


def test_every_flipped_byte_is_refused_and_the_file_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, digest = DiskStore(tmp_path, 1 << 20, PRINT), digest_of(1)
    assert store.write(0, digest, content(1, 60))
    path = store.path(0, digest)
    whole = path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(len(whole))]
    for number, data in enumerate([*damaged, whole[:-1], whole + b"x", b""]):
        path.write_bytes(data)
        caplog.clear()
        assert store.read(0, digest, 60) is None, number
        assert not path.exists() and len(caplog.records) == 1
    path.write_bytes(whole)
    assert np.array_equal(store.read(0, digest, 60), np.concatenate(content(1, 60)))
    for group, other in ((1, digest), (0, digest_of(2))):  # a renamed file
        store.path(group, other).parent.mkdir(exist_ok=True)
        store.path(group, other).write_bytes(whole)
        assert store.read(group, other, 60) is None
    assert DiskStore(tmp_path, 1 << 20, OTHER_PRINT).read(0, digest, 60) is None


def test_the_least_recently_used_blocks_of_all_models_are_removed(tmp_path: Path) -> None:
    old, store = (DiskStore(tmp_path, 8 * PAGE, print_) for print_ in (OTHER_PRINT, PRINT))
    for number in range(8):
        (old if number < 3 else store).write(0, digest_of(number), content(number, 100))
        path = (old if number < 3 else store).path(0, digest_of(number))
        os.utime(path, (number + 1, number + 1))
    assert occupied(tmp_path) == 8 * PAGE
    assert old.read(0, digest_of(0), 100) is not None  # used now
    assert store.write(0, digest_of(8), content(8, 100))
    left = {path.name[:64] for path in blocks(tmp_path)}
    assert digest_of(0).hex() in left and digest_of(8).hex() in left and digest_of(1).hex() not in left
    assert occupied(tmp_path) <= 8 * PAGE
    assert not store.write(0, digest_of(9), content(9, 9 * PAGE))
    assert store.write(0, digest_of(8), content(8, 100)), "it is there"


def test_a_start_counts_the_files_and_removes_what_is_no_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 1 << 20, PRINT)
    store.write(0, digest_of(1), content(1))
    (tmp_path / "unfinished").write_bytes(b"of a killed engine")
    (tmp_path / "notes.txt").write_text("not ours")
    (store.folder / "ab").mkdir(exist_ok=True)
    (store.folder / "ab" / "stray").write_text("foreign")
    (tmp_path / "lock").write_bytes(b"\xff" * 8)
    again = DiskStore(tmp_path, 1 << 20, PRINT)
    assert again.used() == occupied(tmp_path) == 2 * PAGE
    assert not (tmp_path / "unfinished").exists() and not (store.folder / "ab").exists()
    assert (tmp_path / "notes.txt").exists() and [each.levelno for each in caplog.records] == [logging.WARNING]


def test_a_listing_shows_the_files_of_other_engines(tmp_path: Path) -> None:
    one, two = DiskStore(tmp_path, 1 << 20, PRINT), DiskStore(tmp_path, 1 << 20, PRINT)
    digest = digest_of(3)
    one.write(1, digest, content(3))
    listing = two.listed(digest[0], 0)
    assert listing is not None and listing.names == {(1, digest)}
    past = time.time() - 60
    os.utime(one.path(1, digest).parent, (past, past))
    listing = two.listed(digest[0], 0)
    assert listing is not None and two.listed(digest[0], listing.stamp) is None
    two.remove(1, digest)
    assert two.listed(digest[0], listing.stamp) is not None and one.read(1, digest, 5000) is None


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        DiskStore(tmp_path / "file", 1 << 20, PRINT)
    (tmp_path / f"kv1-{PRINT}").mkdir(mode=0o777)
    (tmp_path / f"kv1-{PRINT}").chmod(0o777)
    with pytest.raises(UserError, match="other users may write it"):
        DiskStore(tmp_path, 1 << 20, PRINT)


def test_a_lock_that_another_process_keeps_stops_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.runner.disk_store.LOCK_SECONDS", 0.05)
    one, two = DiskStore(tmp_path, 1 << 20, PRINT), DiskStore(tmp_path, 1 << 20, PRINT)
    with one.locked():
        assert not two.write(0, digest_of(1), content(1))
    assert two.write(0, digest_of(1), content(1))
