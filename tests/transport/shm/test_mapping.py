"""Files in memory: what is mapped is what was offered, or nothing."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys

import pytest

from arpc.transport.shm.blocks import PAGE_BYTES
from arpc.transport.shm.mapping import ArenaFile, ArenaOffer, MappedArena, UnmappableError, is_supported
from arpc.wire.values.raw_memory import view_of
from tests.descriptors import open_descriptors

pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has files in memory without a name")

MIB = 1 << 20


@pytest.fixture
def file():
    made = ArenaFile(64 * MIB)
    yield made
    made.close()


def resident_bytes(file: ArenaFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


@pytest.mark.parametrize("is_warm", [False, True])
def test_what_is_copied_is_seen_by_who_mapped_it(file, is_warm):
    mapped = MappedArena(file.offer)
    source = os.urandom(MIB + 17)
    file.copy(memoryview(source), 2 * MIB, is_warm=is_warm)
    seen = view_of(mapped, mapped.address + 2 * MIB, len(source))
    assert seen == source
    seen[:3] = b"abc"
    assert bytes(view_of(file, file.address + 2 * MIB, 3)) == b"abc", "and they can write to each other"


def test_memory_is_used_where_something_is_and_given_back(file):
    assert resident_bytes(file) == PAGE_BYTES, "the token"
    file.copy(memoryview(bytes(MIB)), 8 * MIB, is_warm=False)
    file.reserve(16 * MIB, MIB)
    assert resident_bytes(file) == 2 * MIB + PAGE_BYTES
    file.free(8 * MIB, MIB)
    assert resident_bytes(file) == MIB + PAGE_BYTES


def test_a_mapping_outlives_its_owner(file):
    file.copy(memoryview(b"still here"), MIB, is_warm=False)
    mapped = MappedArena(file.offer)
    file.close()
    assert bytes(view_of(mapped, mapped.address + MIB, 10)) == b"still here"


def test_all_but_what_is_held_can_be_freed(file):
    mapped = MappedArena(file.offer)
    for offset in (MIB, 2 * MIB, 4 * MIB):
        file.copy(memoryview(b"x" * MIB), offset, is_warm=False)
    mapped.free_all_but([(2 * MIB, 3 * MIB - 5), (4 * MIB + 9000, 4 * MIB + 9001)])
    assert resident_bytes(file) == MIB + PAGE_BYTES
    assert bytes(view_of(mapped, mapped.address + 4 * MIB + 9000, 1)) == b"x"


def test_nobody_can_take_memory_away_from_a_reader(file):
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file.fd, MIB)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_process_started_by_this_one_does_not_have_it(file):
    code = (
        "import os, sys; print(any('arpc' in os.readlink(e.path) for e in os.scandir('/proc/self/fd') if e.is_file()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_offer_that_leads_elsewhere(file, tmp_path):
    offer = file.offer
    ordinary = tmp_path / "file"
    ordinary.write_bytes(bytes(100))
    unsealed = os.memfd_create("arpc", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, offer.size_bytes)
    os.pwrite(unsealed, offer.token, 0)
    with ordinary.open("rb") as opened:
        for wrong, reason in (
            (ArenaOffer(offer.pid, opened.fileno(), 100, offer.token), "is not an arena"),
            (ArenaOffer(offer.pid, 9999, offer.size_bytes, offer.token), "cannot be opened"),
            (ArenaOffer(1 << 40, offer.fd, offer.size_bytes, offer.token), "cannot be opened"),
            (ArenaOffer(-1, offer.fd, offer.size_bytes, offer.token), "cannot be opened"),
            (ArenaOffer(offer.pid, offer.fd, offer.size_bytes, bytes(32)), "of another process"),
            (ArenaOffer(offer.pid, offer.fd, offer.size_bytes, b""), "of another process"),
            (ArenaOffer(offer.pid, offer.fd, offer.size_bytes + 1, offer.token), "could shrink"),
            (ArenaOffer(offer.pid, unsealed, offer.size_bytes, offer.token), "could shrink"),
        ):
            with pytest.raises(UnmappableError, match=reason):
                MappedArena(wrong)
    os.close(unsealed)


def test_an_arena_that_cannot_be_mapped(file, monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    descriptors = open_descriptors()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(UnmappableError, match="cannot be mapped"):
        MappedArena(file.offer)
    with pytest.raises(OSError, match="Cannot allocate"):
        ArenaFile(MIB)
    assert open_descriptors() == descriptors
