"""What lies in a bucket and counts no more: superseded versions of names, old claims and leases, what was asked of
jobs, uploads that never ended. Everything stays for a day, so that who looks at an older listing finds what it says."""

from __future__ import annotations

import logging

from imaged.errors import ObjectMissingError
from imaged.s3.jobs import PREFIX as JOBS
from imaged.s3.names import REFS, Version, current, parse_key
from imaged.s3.objects import Entry, Objects
from imaged.s3.packtable import PACKS
from imaged.s3.serverlease import LEASES

KEPT_S = 24 * 3600.0
log = logging.getLogger(__name__)


def remove_leftovers(objects: Objects, now_s: float) -> int:
    """How many objects. `now_s` is of the S3 server's clock."""
    old_s = now_s - KEPT_S
    keys = [*_names(objects.list(REFS), objects, old_s), *_packs(objects.list(PACKS), old_s)]
    keys += [entry.key for entry in objects.list(LEASES) if entry.modified_s < old_s]
    keys += [entry.key for entry in objects.list(JOBS) if entry.modified_s < old_s and not entry.key.endswith(".json")]
    for key in keys:
        objects.delete(key)
    count = len(keys) + objects.abort_uploads(old_s)
    if count:
        log.info("%d leftovers removed from the bucket", count)
    return count


def _names(entries: list[Entry], objects: Objects, old_s: float) -> list[str]:
    """Old versions that a newer one has superseded, in order: what is left never says that an older one counts."""
    places: dict[str, list[tuple[Version, Entry]]] = {}
    for entry in entries:
        found = parse_key(entry.key)
        if found is not None:
            places.setdefault(entry.key.rpartition("/")[0], []).append((found[2], entry))
    keys = []
    for versions in places.values():
        counts = current(version for version, _ in versions)
        for version, entry in sorted(versions):
            # The age of what supersedes it: somebody may have read the name just before.
            if entry.modified_s >= old_s:
                continue
            if version.kind == "claim" or (
                counts is not None and version < counts and _is_old(versions, counts, old_s)
            ):
                keys.append(entry.key)
        if counts is not None and _is_old(versions, counts, old_s) and _is_gone(counts, versions, objects):
            keys += [entry.key for version, entry in versions if version == counts]
    return keys


def _is_old(versions: list[tuple[Version, Entry]], wanted: Version, old_s: float) -> bool:
    return any(version == wanted and entry.modified_s < old_s for version, entry in versions)


def _is_gone(counts: Version, versions: list[tuple[Version, Entry]], objects: Objects) -> bool:
    """Whether a version is the removal of the name: said by its key, or where there is conditional PUT by its body."""
    if counts.kind == "gone":
        return True
    entry = next(entry for version, entry in versions if version == counts)
    if counts.tail or entry.size_bytes > 64:
        return False
    try:
        return b'"value": null' in objects.get(entry.key)
    except ObjectMissingError:
        return False


def _packs(entries: list[Entry], old_s: float) -> list[str]:
    """Packs whose table of contents never came: their upload was broken off, or their removal was."""
    counted = {entry.key.removesuffix(".idx") for entry in entries if entry.key.endswith(".idx")}
    return [
        entry.key
        for entry in entries
        if entry.key.endswith(".pack") and entry.key.removesuffix(".pack") not in counted and entry.modified_s < old_s
    ]
