"""How long a server is asked again, and which failures make that worth it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from imaged.errors import UpstreamError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to go on after failures that may pass: refused or broken connections, 5xx, 429."""

    total_s: float = 20.0
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def wait_s(self, attempt: int, retry_after_s: float = 0.0) -> float:
        """Before attempt 1, 2, ...: exponential with jitter, at least what the server asked for."""
        grown = min(self.longest_wait_s, self.first_wait_s * 2 ** (attempt - 1))
        return max(random.uniform(grown / 2, grown), retry_after_s)


class UpstreamRefusedError(UpstreamError):
    """Something that this server does not do for us: its token, if there is one, is not for this."""


class UpstreamRetryError(UpstreamError):
    """A failure that may pass: another attempt, here or at another server, is worth it."""

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class UpstreamWrongError(UpstreamRetryError):
    """Another chunk than the one that was asked for."""


class UpstreamIncompleteError(UpstreamError):
    """What was to be named, or its name, is not as the server needs it: status 409."""
