"""HTTP as registries need it: plain http where allowed, proxies, retries that honour Retry-After, careful redirects.

urllib3's own redirect and retry handling is off: it keeps no distinction between the registry and where the registry
sends us, and credentials must never cross that line.
"""

from __future__ import annotations

import email.utils
import ipaddress
import os
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

import urllib3
from urllib3.exceptions import HTTPError, LocationValueError, NameResolutionError, NewConnectionError, SSLError
from urllib3.response import BaseHTTPResponse

from imaged.errors import RegistryError
from imaged.oci.peers import Peers

INSECURE_VARIABLE = "PVISOR_INSECURE_REGISTRIES"
_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_REDIRECT_LIMIT = 10
_DRAIN_LIMIT_BYTES = 64 << 10
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how patiently a failing request is made again. Waits double up to `cap_s`, with jitter."""

    attempts: int = 6
    connect_attempts: int = 4
    base_s: float = 0.5
    cap_s: float = 10.0
    retry_after_cap_s: float = 120.0
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0

    def delay_s(self, failures: int) -> float:
        """How long to wait after this many failures in a row."""
        return min(self.cap_s, self.base_s * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with its body unread. `elsewhere` tells that a redirect led to another host."""

    response: BaseHTTPResponse
    url: str
    elsewhere: bool

    @property
    def status(self) -> int:
        return self.response.status

    def header(self, name: str) -> str:
        return self.response.headers.get(name, "")

    def body(self, limit_bytes: int) -> bytes:
        """The body, at most one byte more than `limit_bytes` of it; the connection goes back to the pool."""
        pieces: list[bytes] = []
        left = limit_bytes + 1
        while left and (piece := self.response.read(left, decode_content=False)):
            pieces.append(piece)
            left -= len(piece)
        self.close()
        return b"".join(pieces)

    def close(self) -> None:
        """Give the connection back when little is left to read, else close it."""
        left = self.response.length_remaining
        if left is None or left > _DRAIN_LIMIT_BYTES:
            self.response.close()
            return
        try:
            self.response.drain_conn()  # also for 0 bytes: http.client wants to have seen the end
        except (HTTPError, OSError):
            self.response.close()
        self.response.release_conn()


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what credentials are bound to. All empty for what is no URL."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", "", 0


def is_listed(host: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether $PVISOR_INSECURE_REGISTRIES lists `HOST[:PORT]`, with or without the port."""
    listed = [one.strip().lower() for one in environ.get(INSECURE_VARIABLE, "").split(",") if one.strip()]
    return host.lower() in listed or _host_name(host) in listed


def _host_name(host: str) -> str:
    return (urllib.parse.urlsplit(f"//{host}").hostname or "").lower()


def allows_plain_http(host: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `HOST[:PORT]` is spoken to without TLS: loopback, and what $PVISOR_INSECURE_REGISTRIES lists."""
    name = _host_name(host)
    if name == "localhost" or is_listed(host, environ):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Http:
    """Connection pools and retries for one registry, which is asked first. May be shared by threads."""

    def __init__(self, policy: RetryPolicy | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.policy = policy or RetryPolicy()
        self._environ = environ
        self._peers = Peers(lambda host: is_listed(host, environ))
        self._direct = self._peers.pools(num_pools=8, maxsize=8)
        self._proxies: dict[str, urllib3.ProxyManager] = {}

    def close(self) -> None:
        """Close all idle connections."""
        self._direct.clear()
        for proxy in self._proxies.values():
            proxy.clear()

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """GET with redirects followed and transient failures retried; any other status is the caller's to judge.

        Authorization is only ever sent to the origin of `url`. RegistryError when no answer could be had.
        """
        return self._retrying("GET", url, headers, None)

    def post_form(self, url: str, fields: Mapping[str, str]) -> Answer:
        """POST of a form; redirects are not followed, as the form holds a secret."""
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._retrying("POST", url, headers, urllib.parse.urlencode(fields).encode())

    def _retrying(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        host = urllib.parse.urlsplit(url).netloc
        failures = 0
        while True:
            wait_s: float | None = None
            try:
                answer = self._follow(method, url, dict(headers), body)
            except (SSLError, LocationValueError) as error:
                raise self._unreachable(host, error) from error
            except HTTPError as error:
                failures += 1
                never_connected = isinstance(error, NewConnectionError | NameResolutionError)
                limit = self.policy.connect_attempts if never_connected else self.policy.attempts
                if failures >= limit:
                    raise self._unreachable(host, error, failures) from error
            else:
                failures += 1
                if answer.status not in _TRANSIENT:
                    return answer
                if failures >= self.policy.attempts:
                    return answer
                wait_s = self._retry_after(answer, host)
                answer.close()
            time.sleep(self.policy.delay_s(failures) if wait_s is None else wait_s)

    def _follow(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        first = origin(url)
        headers = {"User-Agent": "pvisor", "Accept-Encoding": "identity", **headers}
        for _ in range(_REDIRECT_LIMIT):
            timeout = urllib3.Timeout(connect=self.policy.connect_timeout_s, read=self.policy.read_timeout_s)
            response = self._pool(url).request(
                method,
                url,
                headers=headers,
                body=body,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=timeout,
            )
            answer = Answer(response, url, origin(url) != first)
            location = answer.header("Location")
            if method != "GET" or answer.status not in _REDIRECTS or not location:
                return answer
            answer.close()
            target = self._redirect_target(url, location)
            if origin(target) != origin(url):
                headers.pop("Authorization", None)
            url = target
        raise RegistryError(f"{first[1]} redirects more than {_REDIRECT_LIMIT} times")

    def _redirect_target(self, url: str, location: str) -> str:
        """Where a redirect leads; RegistryError when that is no place to go."""
        try:
            target = urllib.parse.urljoin(url, location)
        except ValueError:
            target = location
        scheme, host, _ = origin(target)
        if scheme not in _DEFAULT_PORTS or not host:
            raise RegistryError(f"{origin(url)[1]} redirects to {target[:100]!r}, which is no http URL")
        netloc = urllib.parse.urlsplit(target).netloc.rpartition("@")[2]
        if origin(url)[0] == "https" and scheme == "http" and not allows_plain_http(netloc, self._environ):
            raise RegistryError(
                f"{origin(url)[1]} redirects from https to plain http on {netloc}",
                hint=f"list {netloc} in {INSECURE_VARIABLE} to allow it",
            )
        return target

    def _pool(self, url: str) -> urllib3.PoolManager:
        """Straight or through the proxy that the usual variables name; loopback is never behind one."""
        parts = urllib.parse.urlsplit(url)
        proxy = urllib.request.getproxies_environment().get(parts.scheme)
        host = parts.hostname or ""
        loopback = allows_plain_http(host, {})
        if not proxy or loopback or urllib.request.proxy_bypass(parts.netloc):
            return self._direct
        self._peers.proxied(host, origin(url)[2])
        if proxy not in self._proxies:
            self._proxies[proxy] = urllib3.ProxyManager(proxy if "://" in proxy else f"http://{proxy}", maxsize=8)
        return self._proxies[proxy]

    def _retry_after(self, answer: Answer, host: str) -> float | None:
        """Seconds the server asks to wait; RegistryError when that is longer than anyone should."""
        text = answer.header("Retry-After").strip()
        if text.isdecimal():
            wait_s = float(text)
        else:
            date = email.utils.parsedate_to_datetime(text) if _is_date(text) else None
            if date is None:
                return None
            wait_s = max(0.0, date.timestamp() - time.time())
        if wait_s > self.policy.retry_after_cap_s:
            answer.close()
            raise RegistryError(
                f"{host} answers {answer.status} and asks to wait {wait_s:.0f} s", hint="try again after that time"
            )
        return max(wait_s, self.policy.delay_s(1))

    def _unreachable(self, host: str, error: Exception, attempts: int = 1) -> RegistryError:
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        hint = "check the host name, the network and that the registry is up"
        if isinstance(error, SSLError):
            hint = f"if it speaks plain http, list it in {INSECURE_VARIABLE}; for a private CA set SSL_CERT_FILE"
        reason = str(error).rpartition("object at 0x")[2].partition(": ")[2] or str(error)
        return RegistryError(f"{host} can not be reached{tried}: {reason[:300]}", hint=hint)


def _is_date(text: str) -> bool:
    return email.utils.parsedate_tz(text) is not None
