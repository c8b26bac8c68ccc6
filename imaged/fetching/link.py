"""What is known of the way to one chunk server: how long an answer takes to begin, how fast it comes, does it hang, has
it what it is asked for."""

from __future__ import annotations

import threading
import time
from collections import deque

SHORT_S = 0.003
"""Round trips below this are not worth a byte of guessing: a loopback or a rack neighbour."""
FIRST_HEDGE_S = 0.5
"""How long the first request may be silent, before anything is known of a server."""
LEAST_HEDGE_S = 0.1
MOST_HEDGE_S = 3.0
REST_S = 10.0
"""How long a server that hung or failed is asked last; twice as long each further time."""
MOST_REST_S = 160.0
LACK_S = 5.0
"""How long a server that lacked most of a request is asked after others; twice as long each further time."""
LIE_S = 60.0
"""How long a server that sent wrong bytes twice is asked last."""
_SAMPLES = 16
_FIRST_RATE = 12.5e6
_FIRST_SPARE_BYTES = 192 << 10
"""Before the rate is measured: on a link of 4 Mbit/s they are in the way for 0.4 s, once."""
_MEASURED_BYTES = 64 << 10
"""Shorter answers may come in one piece, however slow the link is."""
_SHORT_BYTES = 16 << 10
_STEP = 1.1
_MOST_SPARE_BYTES = 2 << 20


class Link:
    """Measurements of the requests to one server. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: deque[float] = deque(maxlen=_SAMPLES)
        self._mean_s = self._deviation_s = 0.0
        self._bytes_per_s: float | None = None
        self._resting, self._lacking = _Pause(REST_S), _Pause(LACK_S)
        self._lied_until_s = 0.0

    def note(self, wait_s: float, transfer_bytes: int, transfer_s: float) -> None:
        """A request was answered: it waited so long for the first byte, and then so many bytes came in so long."""
        with self._lock:
            if not self._waits:
                self._mean_s, self._deviation_s = wait_s, wait_s / 2
            else:
                # As TCP does for its retransmission timer, RFC 6298.
                self._deviation_s += (abs(wait_s - self._mean_s) - self._deviation_s) / 4
                self._mean_s += (wait_s - self._mean_s) / 8
            self._waits.append(wait_s)
            # What waits behind other answers comes in one piece in the end: that wait is a part of its transfer.
            self._measure(transfer_bytes, transfer_s + wait_s - min(self._waits))
            self._resting.end()

    def _measure(self, transfer_bytes: int, transfer_s: float) -> None:
        """The first sample is the rate, further ones move it. Short answers only raise it, in small steps: else a link
        that once seemed slow would be asked for little for ever, and little can not show that it is fast."""
        known = self._bytes_per_s
        if transfer_bytes >= _MEASURED_BYTES:
            if transfer_s > 0:
                sample = transfer_bytes / transfer_s
                self._bytes_per_s = sample if known is None else known + (sample - known) / 4
        elif known is not None and transfer_bytes >= _SHORT_BYTES and transfer_bytes > known * _STEP * transfer_s:
            self._bytes_per_s = min(known * _STEP, _FIRST_RATE) if known < _FIRST_RATE else known

    def hung(self) -> None:
        """A request got no byte for longer than `hedge_s`."""
        with self._lock:
            self._resting.begin()

    def failed(self) -> None:
        """A request was refused, or broke off."""
        self.hung()

    def answered(self, asked: int, came: int) -> None:
        """Of so many chunks so many were there. One that has few of them is asked again after a while, and not before
        others for each chunk."""
        with self._lock:
            if came * 2 >= asked:
                self._lacking.end()
            else:
                self._lacking.begin()

    def has_more(self) -> None:
        """There is reason to believe that it has what it is asked for next."""
        with self._lock:
            self._lacking.end()

    def lied(self) -> None:
        """It sent bytes that do not match their id, and did so again."""
        self._lied_until_s = time.monotonic() + LIE_S

    @property
    def is_resting(self) -> bool:
        """Whether it hung or failed lately, so that other servers are asked before it."""
        return self._resting.goes_on

    @property
    def rank(self) -> int:
        """0 for a server to ask in its turn; others come after it, those with the highest rank last."""
        if time.monotonic() < self._lied_until_s:
            return 3
        return 2 if self._resting.goes_on else 1 if self._lacking.goes_on else 0

    @property
    def round_trip_s(self) -> float:
        """The shortest wait of the last requests, which is what a request costs alone; 0.0 when nothing is known."""
        with self._lock:
            return min(self._waits, default=0.0)

    @property
    def hedge_s(self) -> float:
        """The silence after which a request has to be taken for lost: a usual wait and four deviations."""
        with self._lock:
            if not self._waits:
                return FIRST_HEDGE_S
            return min(MOST_HEDGE_S, max(LEAST_HEDGE_S, 2 * self._mean_s + 4 * self._deviation_s))

    @property
    def spare_bytes(self) -> int:
        """As many bytes as come in about the time of a round trip, so that they cost little next to the request that
        brings them; none when round trips are short."""
        round_trip_s, bytes_per_s = self.round_trip_s, self._bytes_per_s
        if round_trip_s < SHORT_S:
            return 0
        if bytes_per_s is None:
            return min(_FIRST_SPARE_BYTES, int(round_trip_s * _FIRST_RATE))
        return min(_MOST_SPARE_BYTES, int(round_trip_s * bytes_per_s))


class _Pause:
    """A while that is twice as long each time that it begins anew without having been ended. Guarded by the link."""

    __slots__ = ("_first_s", "_length_s", "_until_s")

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._length_s = self._until_s = 0.0

    def begin(self) -> None:
        """Does not make one longer that goes on."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._length_s = min(self._length_s * 2 or self._first_s, MOST_REST_S)
        self._until_s = now_s + self._length_s

    def end(self) -> None:
        self._length_s = self._until_s = 0.0

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._until_s
