"""A zip archive whose entries are stored uncompressed, each of them aligned, in any order.

Sizes are known at the start, so that every place is (PKWARE's APPNOTE.TXT, with its Zip64 parts for
what does not fit into 32 bits). The standard library's writer takes twice the time: it computes
checksums and writes in turns.
"""

import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jax_transformer.porting.formats.base import OutputFile, chunks

ALIGNMENT = 64
"""Of the bytes of entries, as in PyTorch's own files."""
LIMIT = 0xFFFFFFFF
"""What does not fit into a field of 32 bits; such a field holds just this."""
PADDING = 0x4246
"""The kind of an extra field that only fills space ("FB", as PyTorch has it)."""
UTF8 = 0x0800
FIRST_DATE = 0x21
"""1980-01-01: the content says nothing of when it was written."""


class Entry(NamedTuple):
    """Where an entry is."""

    header: int
    data: int
    size: int


class StoredZip:
    """An archive of entries of known sizes.

    Args:
        path: the file to make.
        sizes: bytes of each entry.
    """

    def __init__(self, path: Path, sizes: Mapping[str, int]):
        self.path = path
        self.entries: dict[str, Entry] = {}
        end = 0
        for name, size in sizes.items():
            data = end + len(local_header(name, size, 0, 0))
            data += -data % ALIGNMENT
            self.entries[name] = Entry(end, data, size)
            end = data + size
        self._end = end
        self._checksums: dict[str, int] = {}
        self._file: OutputFile | None = None

    def open(self) -> None:
        """Make the file."""
        self._file = OutputFile(self.path)

    def write(self, name: str, data: memoryview) -> None:
        """The bytes of an entry."""
        assert self._file is not None
        entry = self.entries[name]
        # Both let other threads run.
        with ThreadPoolExecutor(1) as pool:
            checksum = pool.submit(checksum_of, data)
            self._file.write(entry.data, data)
        self._checksums[name] = checksum.result()
        header = local_header(name, entry.size, self._checksums[name], entry.data - entry.header)
        self._file.write(entry.header, header)

    def finish(self) -> None:
        """The directory of the archive, without which it is none; all of it on the disk."""
        assert self._file is not None
        directory = b"".join(
            central_header(name, entry, self._checksums[name])
            for name, entry in self.entries.items()
        )
        end = directory_end(len(self.entries), len(directory), self._end)
        self._file.write(self._end, directory + end)
        self._file.finish()

    def release(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def checksum_of(data: memoryview) -> int:
    """The CRC-32 of some bytes."""
    checksum = 0
    for chunk in chunks(data):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def short(value: int) -> int:
    """A number in a field of 32 bits."""
    return value if value < LIMIT else 0xFFFFFFFF


def zip64(*values: int) -> bytes:
    """The extra field with the numbers that do not fit into 32 bits."""
    wide = [value for value in values if value >= LIMIT]
    return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def local_header(name: str, size: int, checksum: int, length: int) -> bytes:
    """What stands before the bytes of an entry, filled up to `length`."""
    encoded = name.encode()
    extra = zip64(size, size)
    space = max(0, length - 30 - len(encoded) - len(extra) - 4)
    extra += struct.pack("<HH", PADDING, space) + b"Z" * space
    return (
        struct.pack(
            "<4s5H3I2H",
            *(b"PK\x03\x04", 45, UTF8, 0, 0, FIRST_DATE),
            *(checksum, short(size), short(size), len(encoded), len(extra)),
        )
        + encoded
        + extra
    )


def central_header(name: str, entry: Entry, checksum: int) -> bytes:
    """What the directory of the archive says of an entry."""
    encoded = name.encode()
    extra = zip64(entry.size, entry.size, entry.header)
    return (
        struct.pack(
            "<4s6H3I5H2I",
            *(b"PK\x01\x02", 45, 45, UTF8, 0, 0, FIRST_DATE),
            *(checksum, short(entry.size), short(entry.size), len(encoded), len(extra)),
            *(0, 0, 0, 0, short(entry.header)),
        )
        + encoded
        + extra
    )


def directory_end(count: int, size: int, offset: int) -> bytes:
    """What stands after the directory: how much of it there is, and where."""
    wide = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset
    ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    fits = count < 0xFFFF and size < LIMIT and offset < LIMIT
    few = min(count, 0xFFFF)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, few, few, short(size), short(offset), 0)
    return end if fits else wide + end
