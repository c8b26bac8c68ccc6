"""A registry whose layer comes half, and then not before it is let go: conversions that run as long as a test likes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.flaky import Content, Flaky, Handler, run_flaky
from tests.support.oci import digest, make_tar, write_layout

LAYER_BYTES = 3_000_000


@dataclass
class HeldRegistry:
    """`asked` counts the requests for the layer, which wait for `go` in the middle of their answer."""

    flaky: Flaky
    layer_path: str
    go: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    @property
    def source(self) -> str:
        return self.flaky.source("team/app:v1")

    def hold(self, handler: Handler, content: Content) -> None:
        """A fault: half of it, and the rest when it is let go."""
        self.asked += 1
        half = len(content.data) // 2
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content.data)))
        handler.end_headers()
        handler.wfile.write(content.data[:half])
        handler.wfile.flush()
        self.go.wait(60)
        handler.wfile.write(content.data[half:])


@contextmanager
def held_registry(scratch: Path, *more: tuple[str, bytes]) -> Iterator[HeldRegistry]:
    """Serves team/app:v1, of one layer with a file of random bytes and `more`."""
    layer = make_tar(("data", os.urandom(LAYER_BYTES)), *more)
    layout = write_layout(scratch / "held", [layer], tag="v1", compression="none")
    with run_flaky() as flaky:
        flaky.serve(layout, "team/app")
        held = HeldRegistry(flaky, f"/v2/team/app/blobs/{digest(layer)}")
        flaky.plan(held.layer_path, *[held.hold] * 20)
        try:
            yield held
        finally:
            held.go.set()
