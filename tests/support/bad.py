"""Bad images, and what may be said and left behind when one is met."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import zstandard

from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from tests.support import oci
from tests.support.command import Host
from tests.support.tars import archive, directory, member

SEED = 20
LIMIT_LINES, LIMIT_CHARACTERS = 3, 900
TAR = oci.OCI_LAYER
NOISE = random.Random(SEED).randbytes(300_000)
PLAIN = archive(directory(b"etc"), member(b"etc/noise", NOISE))
"""No good image of the host has it: a layer with a memo is not read again, whatever became of its blob."""
GZIP, ZSTD = gzip.compress(PLAIN, mtime=0), zstandard.compress(PLAIN)


def says(text: str, *words: str) -> None:
    """The error is short, has no traceback and names what failed."""
    assert text.startswith("pvisor: error: ") and "Traceback" not in text, text
    assert len(text.splitlines()) <= LIMIT_LINES and len(text) <= LIMIT_CHARACTERS, text
    for word in words:
        assert word in text, text


def names(made: Host) -> list[tuple[str, Ref]]:
    """What the store has under which name."""
    with ChunkStore.open(made.root / "home/store", readonly=True) as store:
        return store.refs.items()


def image(path: Path, blob: bytes, *, tag: str = "bad", media_type: str = TAR, diff_id: str = "") -> str:
    """The source of an image whose only layer is this blob; its diff_id is that of PLAIN unless given."""
    descriptor = oci.write_image(path, [PLAIN], diff_ids=[diff_id] if diff_id else None)
    manifest = json.loads(oci.blob_path(path, descriptor["digest"]).read_bytes())
    manifest["layers"] = [oci.write_blob(path, blob, media_type)]
    oci.add_manifest(path, oci.write_json(path, manifest, oci.OCI_MANIFEST), tag=tag)
    return f"oci:{path}:{tag}"


def flipped(data: bytes, at: int) -> bytes:
    """With one bit of this byte the other way."""
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def listing(top: Path) -> dict[str, bytes | str | None]:
    """Paths below `top`: bytes of files, targets of symlinks, None for directories."""
    return {
        str(path.relative_to(top)): str(path.readlink())
        if path.is_symlink()
        else None
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(top.rglob("*"))
    }


def tree_of(made: Host, tmp_path: Path, name: str) -> Path:
    """The files of an image, by `image export` to a directory."""
    made.run("image", "export", name, f"{tmp_path}/tree/")
    return tmp_path / "tree"
