"""Throws damaged segments at the reader: `python -m headrace.testing.fuzz_segments 1000000`.

The reader may lose records, it may not invent, repeat, crash or loop.
"""

import io
import random
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.records import COLUMNS, Amendment, Record
from headrace.storage.segments import SegmentDamage, read_frames

_PATH = Path("fuzzed.seg")


@dataclass(slots=True)
class FuzzReport:
    """What came of a run.

    Attributes:
        executions: Segments read.
        records: Records that came out.
        damages: Troubles reported.
    """

    executions: int = 0
    records: int = 0
    damages: int = 0


def run(executions: int, seed: int) -> FuzzReport:
    """Read this many damaged segments.

    Args:
        executions: How many.
        seed: The same seed damages in the same way.

    Raises:
        AssertionError: The reader invented, repeated or looped; any other exception is a crash of the reader.
    """
    dice = random.Random(seed)
    report = FuzzReport()
    for _ in range(executions):
        originals, content = _segment(dice)
        damaged = _damage(dice, content)
        damages: list[SegmentDamage] = []
        records = list(read_frames(io.BytesIO(damaged), len(damaged), _PATH, damages.append))
        report.executions += 1
        report.records += len(records)
        report.damages += len(damages)
        if len(records) + len(damages) > len(damaged):
            raise AssertionError(f"{len(records)} records and {len(damages)} damages from {len(damaged)} bytes")
        known = {record.request_id: record for record in originals}
        seen: set[str] = set()
        for record in records:
            # A checksum vouches for a frame; only the header's column list, itself under a checksum, could rename.
            if known.get(record.request_id) != record or record.request_id in seen:
                raise AssertionError(f"{record} was never written, or twice, in {damaged!r}")
            seen.add(record.request_id)
        if damaged == content and (records != originals or damages):
            raise AssertionError(f"an undamaged segment lost something: {content!r}")
    return report


def _segment(dice: random.Random) -> tuple[list[Record | Amendment], bytes]:
    body = msgspec.msgpack.encode({"format": 1, "schema": 1, "columns": COLUMNS})
    content = bytearray(b"HRSEGMNT" + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    originals: list[Record | Amendment] = []
    for index in range(dice.randrange(5)):
        record: Record | Amendment
        if dice.random() < 0.2:
            kind, record = 2, Amendment(f"r{index}", dice.random(), "abandoned", "send_failed")
        else:
            payload = dice.randbytes(dice.choice((0, 3, 40))) or None
            zeros: list[Any] = [field.type() for field in msgspec.structs.fields(Record)[1:29]]
            kind, record = 1, Record(*[f"r{index}", *zeros, payload])
        frame = msgspec.msgpack.encode(record)
        content += struct.pack("<IIB", len(frame), zlib.crc32(bytes((kind,)) + frame), kind) + frame
        originals.append(record)
    return originals, bytes(content)


def _damage(dice: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(dice.randrange(4)):
        at = dice.randrange(len(damaged) + 1)
        match dice.randrange(7):
            case 0:
                del damaged[at:]
            case 1:
                damaged[at : at + 1] = dice.randbytes(1)
            case 2:
                damaged[at:at] = dice.randbytes(dice.randrange(20))
            case 3:
                del damaged[at : at + dice.randrange(20)]
            case 4:
                damaged[at : at + 4] = struct.pack("<I", dice.choice((0, 1, 255, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF)))
            case 5:
                damaged[at:] = bytes(len(damaged) - at)
            case _:
                damaged = bytearray(dice.randbytes(dice.randrange(200)))
    return bytes(damaged)


if __name__ == "__main__":
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, seed=0))
