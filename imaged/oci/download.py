"""A blob download that goes on where it broke."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from urllib3.exceptions import HTTPError

from imaged.errors import DigestMismatchError, RegistryError
from imaged.oci.blob import READ_BYTES
from imaged.oci.http import Answer, RetryPolicy

_PROGRESS_BYTES = 1 << 20


class Download:
    """A blob of `size_bytes` as one stream, over as many responses as it takes.

    `request(offset)` asks for the blob from that byte on (0: no Range) and gives an answer of status 200, 206 or
    416. A server that ignores the range is read past what we have; one that answers another range than asked is not
    asked for ranges again. Failures count until the download has moved on by a megabyte.
    """

    def __init__(self, request: Callable[[int], Answer], size_bytes: int, what: str, policy: RetryPolicy) -> None:
        self._request, self._size_bytes, self._what, self._policy = request, size_bytes, what, policy
        self._answer: Answer | None = None
        self._offset = 0
        self._failures = 0
        self._failed_at = 0
        self._uses_range = True

    def read(self, size: int, /) -> bytes:
        while True:
            try:
                if self._answer is None:
                    self._answer = self._connect()
                data = self._answer.response.read(size, decode_content=False)
            except (HTTPError, OSError) as error:
                self._broken(str(error))
                continue
            self._offset += len(data)
            if data or self._offset >= self._size_bytes or not size:
                return data
            self._broken("the response ended early")

    def close(self) -> None:
        """Give the connection back."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _connect(self) -> Answer:
        """A response whose next byte is the one at our offset."""
        asked = self._offset if self._uses_range else 0
        answer = self._request(asked)
        self._answer = answer  # closed by _broken or close, whatever happens below
        if answer.status == 416:
            raise self._mismatch(f"no bytes from {asked} on ({answer.header('Content-Range')[:60]})")
        start, total = self._range(answer)
        if start != (asked if answer.status == 206 else 0):
            self._uses_range = False
            raise OSError(f"asked for bytes from {asked} on, the answer has Content-Range {start}-")
        if total is not None and total != self._size_bytes:
            raise self._mismatch(f"{total} bytes")
        ahead = self._offset - start
        while ahead:
            skipped = answer.response.read(min(ahead, READ_BYTES), decode_content=False)
            if not skipped:
                raise OSError("the response ended early")
            ahead -= len(skipped)
        return answer

    def _range(self, answer: Answer) -> tuple[int, int | None]:
        """Where the body starts, and how many bytes the whole blob has as far as the answer says."""
        if answer.status == 206:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.header("Content-Range").strip())
            if match is None:
                return -1, None
            return int(match[1]), None if match[3] == "*" else int(match[3])
        length = answer.header("Content-Length")
        return 0, int(length) if length.isdecimal() else None

    def _broken(self, reason: str) -> None:
        """Count a failure and wait, or give up."""
        if self._answer is not None:
            self._answer.response.close()
            self._answer = None
        if self._offset - self._failed_at >= _PROGRESS_BYTES:
            self._failures = 0
        self._failed_at = self._offset
        self._failures += 1
        if self._failures < self._policy.attempts:
            time.sleep(self._policy.delay_s(self._failures))
            return
        if "ended early" in reason:
            raise self._mismatch(f"{self._offset} bytes")
        raise RegistryError(
            f"{self._what} broke off {self._failures} times, last at byte {self._offset} of {self._size_bytes}: "
            f"{reason[:200]}",
            hint="check the network and try again; layers that were complete are kept",
        )

    def _mismatch(self, found: str) -> DigestMismatchError:
        return DigestMismatchError(
            f"{self._what}: the registry has {found}, not the {self._size_bytes} bytes its descriptor says",
            hint="the source is damaged or was changed: push the image again",
        )
