"""Objects of one store through boto3: bounded, with timeouts, tried again, and with errors that name the object.

Endpoint, region and credentials come from where AWS's own tools take them (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID,
AWS_PROFILE, instance roles). Error texts are made of codes and keys: what an SDK or a server says may hold credentials.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from imaged.errors import BucketError, BucketUnavailableError, ObjectMissingError, StoreError
from imaged.s3.address import BucketAddress, Patience, endpoint
from imaged.s3.objects import Entry, Made

PART_BYTES = 16 << 20
"""Objects over this size are sent in parts of it."""
CONNECTIONS = 16
_CONNECT_S = 5.0
_BACKOFF_S, _BACKOFF_LIMIT_S = 0.1, 5.0
_TRANSIENT = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling", "ThrottlingException",
     "TooManyRequests", "OperationAborted", "ConditionalRequestConflict"}
)  # fmt: skip
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName"})
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401", "403"}
)
T = TypeVar("T")
log = logging.getLogger(__name__)


class S3Objects:
    """The objects of a store, of one process; `close` when done. Threads share it. `requests` counts, for tests."""

    def __init__(self, address: BucketAddress, patience: Patience) -> None:
        self.address, self._patience = address, patience
        self.requests = 0
        self._client = _client(patience)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="s3-part")
        self._random = random.Random()
        self._closing = threading.Event()

    def hurry(self) -> None:
        """Nothing is tried again from now on."""
        self._closing.set()

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True)
        self._client.close()

    def get(self, key: str) -> bytes:
        body: bytes = self._call("read", key, lambda: _body(self._client.get_object(**self._at(key))))
        return body

    def read(self, key: str, start: int, length: int) -> bytes:
        def once() -> bytes:
            answer = self._client.get_object(**self._at(key), Range=f"bytes={start}-{start + length - 1}")
            if answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and start:
                answer["Body"].close()
                raise BucketError(f"{self._name(key)}: the server gives no parts of objects")
            return _body(answer, limit_bytes=length)

        return self._call("read", key, once)

    def put(self, key: str, body: bytes) -> float:
        answer = self._call(
            "write", key, lambda: self._client.put_object(**self._at(key), Body=body, ContentMD5=_md5(body))
        )
        return _server_time(answer)

    def put_new(self, key: str, body: bytes) -> Made:
        attempts = 0

        def once() -> Made:
            nonlocal attempts
            attempts += 1
            try:
                self._client.put_object(**self._at(key), Body=body, ContentMD5=_md5(body), IfNoneMatch="*")
            except Exception as error:
                _, status = _code(error)
                if status == 501:
                    return Made.UNSUPPORTED
                if status == 412:
                    return Made.TAKEN
                raise
            return Made.YES

        made = self._call("write", key, once)
        if made is Made.TAKEN and attempts > 1:
            # An earlier try may have arrived although its answer did not.
            return Made.YES if self.get(key) == body else made
        return made

    def upload(self, key: str, path: Path, length: int) -> None:
        with path.open("rb") as file:
            if length <= PART_BYTES:
                self.put(key, _exactly(file.read(length), length, path))
                return
        self._upload_parts(key, path, length)

    def _upload_parts(self, key: str, path: Path, length: int) -> None:
        begun = self._call("write", key, lambda: self._client.create_multipart_upload(**self._at(key)))
        upload = begun["UploadId"]

        def part(number: int) -> dict[str, Any]:
            start = (number - 1) * PART_BYTES
            size = min(PART_BYTES, length - start)
            with path.open("rb") as file:
                file.seek(start)
                body = _exactly(file.read(size), size, path)
            answer = self._call(
                "write",
                key,
                lambda: self._client.upload_part(
                    **self._at(key), UploadId=upload, PartNumber=number, Body=body, ContentMD5=_md5(body)
                ),
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = list(self._pool.map(part, range(1, -(-length // PART_BYTES) + 1)))
            self._call(
                "write",
                key,
                lambda: self._client.complete_multipart_upload(
                    **self._at(key), UploadId=upload, MultipartUpload={"Parts": parts}
                ),
            )
        except StoreError:
            # A try whose answer got lost may have put it together: the next one is then told that there is no upload.
            if self._size(key) != length:
                self._abort(key, upload)
                raise
        except BaseException:
            self._abort(key, upload)
            raise

    def _size(self, key: str) -> int:
        found = [entry.size_bytes for entry in self.list(key) if entry.key == key]
        return found[0] if found else -1

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._client.abort_multipart_upload(**self._at(key), UploadId=upload)
        except Exception as error:
            log.warning("%s: parts of an upload stay: %s", self._name(key), _code(error)[0])

    def list(self, prefix: str, *, after: str = "") -> list[Entry]:
        found: list[Entry] = []
        whole = self.address.key(prefix)
        cut = len(self.address.key(""))
        more: dict[str, str] = {"StartAfter": self.address.key(after)} if after else {}
        while True:
            page = self._call("list", prefix, lambda: self._page(whole, more))  # noqa: B023
            found += [
                Entry(one["Key"][cut:], one["Size"], one["ETag"].strip('"'), one["LastModified"].timestamp())
                for one in page.get("Contents", [])
            ]
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _page(self, prefix: str, more: dict[str, str]) -> Any:
        return self._client.list_objects_v2(Bucket=self.address.bucket, Prefix=prefix, **more)

    def delete(self, key: str) -> None:
        try:
            self._call("remove", key, lambda: self._client.delete_object(**self._at(key)))
        except ObjectMissingError:
            return

    def abort_uploads(self, older_than_s: float) -> int:
        prefix = self.address.key("packs/")
        page = self._call(
            "list", "uploads", lambda: self._client.list_multipart_uploads(Bucket=self.address.bucket, Prefix=prefix)
        )
        old = [one for one in page.get("Uploads", []) if one["Initiated"].timestamp() < older_than_s]
        for one in old:
            self._abort(one["Key"][len(self.address.key("")) :], one["UploadId"])
        return len(old)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.address.bucket, "Key": self.address.key(key)}

    def _name(self, key: str) -> str:
        return f"s3://{self.address.bucket}/{self.address.key(key)}"

    def _call(self, verb: str, key: str, once: Callable[[], T]) -> T:
        """With tries again after what may pass: no answer, a broken-off body, 5xx, 429."""
        delay_s = _BACKOFF_S
        for attempt in range(1, self._patience.attempts + 1):
            self.requests += 1
            try:
                return once()
            except StoreError:
                raise
            except Exception as error:
                code, status = _code(error)
                if not _is_transient(error, code, status):
                    raise self._error(verb, key, code, status, error) from None
                if attempt == self._patience.attempts or self._closing.is_set():
                    raise BucketUnavailableError(
                        f"{self._name(key)}: can not {verb} it, {attempt} tries: {code}",
                        hint=f"see whether the S3 server at {endpoint() or 'AWS'} answers; then try again",
                    ) from None
                log.info("%s: can not %s it: %s; trying again", self._name(key), verb, code)
            self._closing.wait(delay_s * self._random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, _BACKOFF_LIMIT_S)
        raise AssertionError("no attempts")

    def _error(self, verb: str, key: str, code: str, status: int, error: Exception) -> StoreError:
        name = self._name(key)
        if code in _NO_BUCKET:
            return BucketError(
                f"bucket {self.address.bucket}: there is none at {endpoint() or 'AWS'} ({code})",
                hint=f"make it, such as with `aws s3 mb s3://{self.address.bucket}`, or see AWS_ENDPOINT_URL_S3",
            )
        if code in _MISSING or status == 404:
            return ObjectMissingError(f"{name}: there is no such object")
        if code in _DENIED or status in (401, 403):
            hint = "see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy: reading, writing, listing"
            return BucketError(f"{name}: the S3 server does not let us {verb} it ({code})", hint=hint)
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            return BucketError(f"{name}: there are no credentials for S3", hint=hint)
        return BucketError(f"{name}: can not {verb} it: {code}", hint="see AWS_ENDPOINT_URL_S3 and AWS_DEFAULT_REGION")


def _client(patience: Patience) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    for name in ("boto3", "botocore", "s3transfer"):
        logging.getLogger(name).setLevel(logging.WARNING)  # their debug output has signed headers
    config = Config(
        connect_timeout=min(_CONNECT_S, patience.timeout_s),
        read_timeout=patience.timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
        s3={"addressing_style": "path" if endpoint() else "auto"},
        # Checksums in trailers are newer than many S3 servers; chunks are verified against their ids anyway.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        import os

        named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        session = boto3.Session()
        region = named or session.region_name or "us-east-1"
        return session.client("s3", config=config, region_name=region)
    except (BotoCoreError, ValueError) as error:
        raise BucketError(
            f"the settings for S3 can not be used: {type(error).__name__}",
            hint="see AWS_ENDPOINT_URL_S3, AWS_PROFILE and AWS_DEFAULT_REGION",
        ) from None


def _body(answer: Any, *, limit_bytes: int | None = None) -> bytes:
    with answer["Body"] as stream:
        data: bytes = stream.read() if limit_bytes is None else stream.read(limit_bytes)
        expected = answer["ContentLength"] if limit_bytes is None else min(answer["ContentLength"], limit_bytes)
    if len(data) != expected:
        raise ConnectionError(f"{len(data)} of {expected} bytes")
    return data


def _code(error: Exception) -> tuple[str, int]:
    """What went wrong in one word, and the HTTP status or 0."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(answer.get("Error", {}).get("Code", "")) or str(status)
        return (code if code.isalnum() else str(status)), status
    if isinstance(error, ConnectionError):
        return "the answer broke off", 0
    return type(error).__name__, 0


def _is_transient(error: Exception, code: str, status: int) -> bool:
    from botocore.exceptions import ConnectionError as NotConnectedError
    from botocore.exceptions import HTTPClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if status:
        return status in (429, 500, 502, 503, 504) or code in _TRANSIENT
    return isinstance(error, NotConnectedError | HTTPClientError | HTTPError | OSError | ResponseParserError)


def _server_time(answer: Any) -> float:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return time.time()


def _exactly(data: bytes, length: int, path: Path) -> bytes:
    if len(data) != length:
        raise StoreError(f"{path}: {len(data)} bytes where {length} were expected")
    return data


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
