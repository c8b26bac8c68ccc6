"""One answer with everything that a start needs: record, profile, metadata, roots, leaves, and the profile's chunks."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from imaged.errors import ChunkError, FormatError, UpstreamError
from imaged.fetching.httpanswer import Answer
from imaged.fetching.httpcall import Call
from imaged.fetching.retry import UpstreamRetryError
from imaged.fetching.serverconnection import ServerConnection
from imaged.frame import Frame
from imaged.profile import Profile

_FIRST_LIMIT_BYTES = 64 << 20
"""Of a boot answer, before the chunks of the profile: a hundred times what an image of 500 MB needs."""
_FIRST_LIMIT_S = 10.0
_AHEAD_LIMIT_S = 600.0
"""How long the parts of a boot answer may take, counted from its first byte; what did not come by then is asked for."""
_MOST_FRAMES = sys.maxsize
"""What itertools takes: a count in a header may be any number."""
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BootStream(Generic[T]):
    """The image or snapshot that was `found`, its profile if it has one, the frame of its record, and the frames that
    follow, which are unverified: `first` what it starts with, then `rest` those that the profile names."""

    found: T
    profile: Profile | None
    record_frame: Frame
    first: Iterator[Frame]
    rest: Iterator[Frame]


class BootConnection(ServerConnection):
    """A server asked for boot answers."""

    @contextlib.contextmanager
    def _boot(
        self,
        path: str,
        what: str,
        header: str,
        parse: Callable[[Mapping[str, Any], bytes], T],
        tag: str | None,
    ) -> Iterator[BootStream[T] | None]:
        headers = {"If-None-Match": tag} if tag is not None else {}
        with contextlib.ExitStack() as stack:
            call = Call()

            def attempt() -> Answer:
                nonlocal call
                call = Call(longest_s=_FIRST_LIMIT_S)
                with self._given_up(call):
                    return stack.enter_context(self._request("GET", path, headers=headers, call=call))

            # What breaks once there is an answer is the caller's to see.
            answer = self._retry(attempt)
            if answer.status == 304:
                if tag is None:
                    raise UpstreamError(f"{self.url}: {what}: status 304, and nothing was said to be known")
                answer.read(0)
                yield None
                return
            try:
                document = json.loads(answer.header(header))
                stated_profile, count = document.get("profile"), int(document.get("frames", _MOST_FRAMES))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise UpstreamError(f"{self.url}: {what}: no {header.title()} header in the answer") from error
            frame, profile = self._read_frame(answer), None
            if frame is not None and stated_profile is not None and str(frame.id) != document.get("id"):
                profile = self._profile(frame)
                frame = self._read_frame(answer)
            if frame is None:
                raise UpstreamRetryError(f"{self.url}: {what}: an empty answer")
            try:
                found = parse(document, frame.open())
            except (ChunkError, FormatError) as error:
                hint = f"`pvisor {what.partition(' ')[0]} verify` there says whether the server's store is sound"
                raise UpstreamError(f"{self.url}: {what}: {error.message}", hint=hint) from error
            rest = self._rest(answer)
            first = itertools.islice(rest, min(max(0, count - 1), _MOST_FRAMES))
            yield BootStream(found, profile, frame, self._bounded(first, call), rest)

    @contextlib.contextmanager
    def _given_up(self, call: Call) -> Iterator[None]:
        """End the call when its answer has not begun in time."""
        if self._silence_s == math.inf:
            yield
            return
        timer = threading.Timer(self._silence_s, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _bounded(self, frames: Iterator[Frame], call: Call) -> Iterator[Frame]:
        """The first part of a boot answer; then there is more time for what follows it."""
        room = _FIRST_LIMIT_BYTES
        for frame in frames:
            room -= frame.stored_bytes
            if room < 0:
                raise UpstreamError(f"{self.url}: more than {_FIRST_LIMIT_BYTES} bytes before an image can start")
            yield frame
        call.longest_s = _AHEAD_LIMIT_S

    def _profile(self, frame: Frame) -> Profile | None:
        """None when it is none: an image starts without, too."""
        try:
            return Profile.parse(frame.open())
        except (ChunkError, FormatError) as error:
            log.warning("%s: %s", self.url, error.message)
            return None

    def _rest(self, answer: Answer) -> Iterator[Frame]:
        while (frame := self._read_frame(answer)) is not None:
            yield frame
