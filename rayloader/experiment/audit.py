"""Recompute what the receipts of a run claim, and say what cannot be known from them.

Receipts here are the JSON lines that ``rayloader_dlio`` writes beside DLIO's output, one record
per rank and epoch. Nothing is read but these files.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from rayloader.errors import ReceiptError, printable

FORMAT = 1
"""Of the records that are understood here."""
FILES = "rayloader_receipts_*.jsonl"
NOMINAL_SHARE = 0.01
"""DLIO's figure for the bytes may differ from the real one by this share."""
_HASHES = 1 << 64
_NEEDED = (
    "format", "run", "rank", "world_size", "part", "epoch", "steps_expected", "steps_yielded",
    "files_assigned", "files_read", "files_remainder", "assigned_hash", "assigned_order_hash",
    "read_hash", "order_hash", "share_hash", "dataset_hash", "dataset_files", "bytes_nominal",
    "bytes_files", "bytes_transferred", "bytes_before_clock", "metadata_ops_before_clock",
    "reader_pid", "restarts", "retries", "skipped", "device_bytes", "device_bytes_why",
    "resident_bytes_before", "deliver", "read_ahead_batches_max", "storage",
)  # fmt: skip

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about one claim.

    Attributes:
        claim: in words.
        problems: where it does not hold; empty: it holds everywhere.
    """

    claim: str
    problems: list[str]

    @property
    def holds(self) -> bool:
        """The records bear the claim out."""
        return not self.problems


@dataclasses.dataclass(frozen=True)
class Audit:
    """Everything found in the receipts of one run.

    Attributes:
        records: how many there are.
        ranks: of the run.
        epochs: of training.
        findings: one for each claim.
        unknown: what these records cannot show.
    """

    records: int
    ranks: int
    epochs: int
    findings: list[Finding]
    unknown: list[str]

    @property
    def holds(self) -> bool:
        """Every claim holds."""
        return all(finding.holds for finding in self.findings)


def audit(directory: str) -> Audit:
    """Check the receipts in a directory.

    Raises:
        ReceiptError: there are none, they cannot be read, or are not such records.
    """
    records = list(_records(directory))
    groups: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["part"], record["epoch"]].append(record)
    ordered = {key: sorted(groups[key], key=_rank) for key in sorted(groups)}
    findings = [Finding(claim, list(check(ordered))) for claim, check in _CLAIMS.items()]
    epochs = len({epoch for part, epoch in ordered if part == "train"})
    return Audit(len(records), records[0]["world_size"], epochs, findings, list(_unknown(ordered)))


# The files


def _records(directory: str) -> Iterator[Record]:
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), FILES)))
    if not paths:
        raise ReceiptError(
            f"{printable(directory)}: no receipts here ({FILES}); give the output folder of a DLIO "
            "run that read through rayloader_dlio"
        )
    known: dict[str, Any] = {}
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            record = _record(line, f"{printable(path)}, line {number}")
            for name in ("run", "world_size"):
                if known.setdefault(name, record[name]) != record[name]:
                    raise ReceiptError(f"{printable(directory)}: receipts of more than one run")
            yield record
    if not known:
        raise ReceiptError(f"{printable(directory)}: the receipts are empty: no epoch has ended")


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ReceiptError(f"{printable(path)}: cannot be read: {error}") from error
    return lines[:-1]  # a run that was killed may have left half a line, or an empty one


def _record(line: str, place: str) -> Record:
    try:
        record = json.loads(line)
        missing = [name for name in _NEEDED if name not in record]
    except (ValueError, TypeError) as error:
        raise ReceiptError(f"{place}: no record: {error}") from error
    if not isinstance(record, dict) or missing:
        raise ReceiptError(f"{place}: no record of rayloader_dlio: {', '.join(missing)} missing")
    if record["format"] != FORMAT:
        raise ReceiptError(
            f"{place}: format {record['format']!r}: this rayloader knows {FORMAT} only"
        )
    return record


# The claims: each check yields what contradicts it

Groups = dict[tuple[str, int], list[Record]]


def _complete(groups: Groups) -> Iterator[str]:
    for key, records in groups.items():
        ranks = [record["rank"] for record in records]
        if ranks != list(range(records[0]["world_size"])):
            yield f"{_named(key)}: records of ranks {ranks}, of {records[0]['world_size']}"


def _equal_steps(groups: Groups) -> Iterator[str]:
    for key, records in groups.items():
        steps = {(record["steps_yielded"], record["steps_expected"]) for record in records}
        if len(steps) > 1 or any(given != wanted for given, wanted in steps):
            told = ", ".join(f"{given} of {wanted}" for given, wanted in sorted(steps))
            yield f"{_named(key)}: steps {told}"


def _as_assigned(groups: Groups) -> Iterator[str]:
    for key, record in _each(groups):
        wanted = record["files_assigned"] - record["files_remainder"]
        if record["files_read"] != wanted:
            yield f"{_named(key, record)}: read {record['files_read']} files of {wanted}"
        elif record["read_hash"] != record["assigned_hash"]:
            yield f"{_named(key, record)}: other files were read than DLIO assigned"
        elif record["order_hash"] != record["assigned_order_hash"]:
            yield f"{_named(key, record)}: the files were read in another order"


def _disjoint(groups: Groups) -> Iterator[str]:
    for key, records in groups.items():
        assigned = sum(record["files_assigned"] for record in records)
        existing = sum(record["dataset_files"] for record in records)
        if assigned != existing:
            yield (
                f"{_named(key)}: DLIO assigned {assigned} files in all, of {existing} that it has"
            )
        elif _sum(records, "share_hash") != _sum(records, "dataset_hash"):
            yield f"{_named(key)}: DLIO assigned some files twice and others not at all"


def _on_the_clock(groups: Groups) -> Iterator[str]:
    for key, record in _each(groups):
        bytes_, ops = record["bytes_before_clock"], record["metadata_ops_before_clock"]
        if bytes_ or ops:
            yield f"{_named(key, record)}: {bytes_:,} bytes and {ops} operations before the clock"


def _once(groups: Groups) -> Iterator[str]:
    for key, record in _each(groups):
        more = record["bytes_transferred"] - record["bytes_files"]
        if more and not (record["retries"] or record["restarts"]):
            yield (
                f"{_named(key, record)}: {record['bytes_transferred']:,} bytes came from the "
                f"storage for {record['bytes_files']:,} bytes of files"
            )


def _nominal(groups: Groups) -> Iterator[str]:
    for key, record in _each(groups):
        nominal, real = record["bytes_nominal"], record["bytes_files"]
        if abs(nominal - real) > NOMINAL_SHARE * real:
            share = nominal / real - 1 if real else float("inf")
            yield (
                f"{_named(key, record)}: DLIO reckons {nominal:,} bytes, the files have {real:,} "
                f"({share:+.1%})"
            )


def _same_processes(groups: Groups) -> Iterator[str]:
    first: dict[int, Record] = {}
    for key, record in _each(groups):
        before = first.setdefault(record["rank"], record)
        if record["reader_pid"] != before["reader_pid"] or record["restarts"]:
            yield f"{_named(key, record)}: another reader process than at first"


def _nothing_skipped(groups: Groups) -> Iterator[str]:
    for key, record in _each(groups):
        if record["skipped"]:
            yield f"{_named(key, record)}: {len(record['skipped'])} files were left out"


_CLAIMS: dict[str, Callable[[Groups], Iterator[str]]] = {
    "every rank has a record of every epoch": _complete,
    "all ranks took the same steps, as many as expected": _equal_steps,
    "what was read is what DLIO assigned, in its order": _as_assigned,
    "the ranks' shares are disjoint and complete": _disjoint,
    "nothing was read or looked up before the clock": _on_the_clock,
    "each rank read each of its files once": _once,
    "DLIO's bytes are within 1 % of the real ones": _nominal,
    "one reader process per rank, from beginning to end": _same_processes,
    "no file was left out": _nothing_skipped,
}


# What remains open


def _unknown(groups: Groups) -> Iterator[str]:
    records = [record for _, record in _each(groups)]
    reasons = {str(r["device_bytes_why"]) for r in records if r["device_bytes"] is None}
    if reasons:
        yield f"whether the bytes came from a device or from a cache: {'; '.join(sorted(reasons))}"
    else:
        yield (
            "whose reads the device's bytes were: the kernel counts those of everybody on the node"
        )
    if any(record["resident_bytes_before"] is None for record in records):
        yield "how much was cached before each epoch"
    else:
        yield "exactly how much was cached before: it was estimated from a few files"
    if not all(record["deliver"] for record in records):
        yield "whether a trainer could have taken the bytes: deliver=false dropped them"
    if any(record["storage"] != "file" for record in records):
        yield "what caches lie between here and the object storage"
    yield "whether the bytes were right: contents are not compared with anything"
    yield (
        "whether the records are true: they are written by the program that they are about, and "
        "64-bit hashes find mistakes, not forgers"
    )


def _each(groups: Groups) -> Iterator[tuple[tuple[str, int], Record]]:
    for key, records in groups.items():
        for record in records:
            yield key, record


def _sum(records: list[Record], name: str) -> int:
    return sum(int(record[name], 16) for record in records) % _HASHES


def _rank(record: Record) -> int:
    return int(record["rank"])


def _named(key: tuple[str, int], record: Record | None = None) -> str:
    part, epoch = key
    return f"{part} epoch {epoch}" + (f", rank {record['rank']}" if record is not None else "")
