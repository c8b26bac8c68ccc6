"""Where things are on this host, resolved once: flag, then environment, then default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from imaged.errors import InvalidNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`home` keeps what must survive a reboot (the chunk store, stages), `run` what must not (sockets, mounts, locks).

    `server` is the base URL of the chunk server without a trailing slash, several with commas between them in the order
    in which they are asked (`servers`), or None for the embedded store alone. `store_directory` is a store elsewhere
    than in `home`. `cache_max_bytes` is what the node daemon may keep of what servers can give again; None is no bound.
    `require_signature` are public keys (PEM files): unless it is
    empty, one of them must have signed an image that is pulled or opened.
    """

    home: Path
    run: Path
    server: str | None = None
    store_directory: Path | None = None
    require_signature: tuple[Path, ...] = ()
    cache_max_bytes: int | None = None

    @classmethod
    def resolve(
        cls,
        *,
        server: str | None = None,
        require_signature: Sequence[Path] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> Self:
        """From PVISOR_HOME, PVISOR_RUN, PVISOR_SERVER, PVISOR_CACHE_MAX, PVISOR_REQUIRE_SIGNATURE (a list as
        PATH is one) and the defaults; `server` and `require_signature` are flags and win. InvalidNameError.

        PVISOR_TOKEN is noted for these servers (imaged/fetching/credentials.py), and is nowhere in here.
        """
        root = os.geteuid() == 0
        user_home = Path(environ.get("HOME", "/"))
        data_home = Path(environ.get("XDG_DATA_HOME") or user_home / ".local/share")
        runtime = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}")
        home = environ.get("PVISOR_HOME") or ("/var/lib/pvisor" if root else str(data_home / "pvisor"))
        run = environ.get("PVISOR_RUN") or ("/run/pvisor" if root else str(runtime / "pvisor"))
        urls = server_urls(server or environ.get("PVISOR_SERVER") or "")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise InvalidNameError(
                    f"server {url!r} is not an http:// or https:// URL", hint="give --server http://HOST:PORT"
                )
            if "@" in url.partition("://")[2].partition("/")[0]:
                raise InvalidNameError("a server's URL has no user or password", hint="give a token in PVISOR_TOKEN")
        if environ.get("PVISOR_TOKEN"):
            from imaged.fetching.credentials import KNOWN

            KNOWN.learn(",".join(urls), environ["PVISOR_TOKEN"])
        keys = require_signature or _required_keys(environ.get("PVISOR_REQUIRE_SIGNATURE") or "")
        required = tuple(Path(key).absolute() for key in keys)
        return cls(
            home=Path(home).absolute(),
            run=Path(run).absolute(),
            server=",".join(urls) or None,
            require_signature=required,
            cache_max_bytes=_cache_max(environ.get("PVISOR_CACHE_MAX") or ""),
        )

    @property
    def servers(self) -> tuple[str, ...]:
        """The chunk servers in the order in which they are asked: peers and caches first, the origin last."""
        return server_urls(self.server or "")

    @property
    def origin(self) -> str | None:
        """The last server: what is written goes there, and what there is altogether is what it lists."""
        return self.servers[-1] if self.server else None

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


def server_urls(text: str) -> tuple[str, ...]:
    """The URLs in a list with commas, without trailing slashes, each once."""
    return tuple(dict.fromkeys(url for part in text.split(",") if (url := part.strip().rstrip("/"))))


def _required_keys(text: str) -> list[str]:
    """The paths in a list as PATH is one. A list of none would require nothing, and was not set for that."""
    keys = [key for key in text.split(os.pathsep) if key]
    if text and not keys:
        raise InvalidNameError(
            f"PVISOR_REQUIRE_SIGNATURE {text!r} names no key",
            hint="give the PEM files of public keys, or unset it to require no signature",
        )
    return keys


def _cache_max(text: str) -> int | None:
    if not text:
        return None
    from imaged.sizes import cache_bytes  # on the start of every command, which has none as a rule

    return cache_bytes(text, "PVISOR_CACHE_MAX")
