"""Where things are on this host, resolved once: flag, then environment, then default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from imaged.errors import InvalidNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`home` keeps what must survive a reboot (the chunk store, stages), `run` what must not (sockets, mounts, locks).

    `server` is the base URL of the chunk server without a trailing slash, or None for the embedded store alone.
    `store_directory` is a store elsewhere than in `home`.
    """

    home: Path
    run: Path
    server: str | None = None
    store_directory: Path | None = None

    @classmethod
    def resolve(cls, *, server: str | None = None, environ: Mapping[str, str] = os.environ) -> Self:
        """From PVISOR_HOME, PVISOR_RUN, PVISOR_SERVER and the defaults; `server` is the flag and wins."""
        root = os.geteuid() == 0
        user_home = Path(environ.get("HOME", "/"))
        data_home = Path(environ.get("XDG_DATA_HOME") or user_home / ".local/share")
        runtime = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}")
        home = environ.get("PVISOR_HOME") or ("/var/lib/pvisor" if root else str(data_home / "pvisor"))
        run = environ.get("PVISOR_RUN") or ("/run/pvisor" if root else str(runtime / "pvisor"))
        url = (server or environ.get("PVISOR_SERVER") or "").rstrip("/") or None
        if url is not None and not url.startswith(("http://", "https://")):
            raise InvalidNameError(
                f"server {url!r} is not an http:// or https:// URL", hint="give --server http://HOST:PORT"
            )
        return cls(home=Path(home).absolute(), run=Path(run).absolute(), server=url)

    @property
    def store(self) -> Path:
        """The chunk store: packs and index."""
        return self.store_directory or self.home / "store"

    @property
    def stages(self) -> Path:
        """Retained writes, one directory a stage."""
        return self.home / "stages"

    @property
    def metadata(self) -> Path:
        """Local copies of EROFS metadata images, one file an image (`<metadata id>.erofs`)."""
        return self.home / "metadata"

    @property
    def blocks(self) -> Path:
        """The FUSE mount: one file a block image, named by its id."""
        return self.run / "blocks"

    @property
    def images(self) -> Path:
        """EROFS mounts, one directory an image, named by its id."""
        return self.run / "images"
