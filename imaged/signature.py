"""Signatures of images: Ed25519 over the name and the id of an image (docs/formats/signature.md).

Whoever publishes an image signs it; whoever wants only such images names the public keys that may. The key of a signer
stays with the signer: servers keep signatures and check none. An image's id verifies every byte of it, so nothing else
has to be signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType, Self

from imaged.errors import FormatError, SignatureError
from imaged.ids import ChunkId
from imaged.regularfile import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KeyId = NewType("KeyId", str)
"""64 hex digits: the SHA-256 of a public key in DER, as `openssl pkey -pubin -outform DER` gives it."""
SIGNATURE_BYTES = 64
SIGNATURE_LIMIT = 8
"""Of one name. They travel in a header."""
_KEY_BYTES = 32
_DER_PREFIX = bytes.fromhex("302a300506032b6570032100")
"""RFC 8410: a SubjectPublicKeyInfo of Ed25519; the key's own bytes follow."""
_BEGIN, _END = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"
_FILE_LIMIT_BYTES = 64 << 10
_HOW = "`openssl genpkey -algorithm ed25519 -out KEY` makes a key, `openssl pkey -in KEY -pubout` its public half"


def signed_text(name: str, image: ChunkId) -> bytes:
    """What a signature is over. A name has no line ends in it."""
    return f"pvisor image v1\n{name}\n{image}\n".encode("ascii")


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of one key under one name of an image; nothing is said about whether it is right."""

    key: KeyId
    value: bytes

    def to_json(self) -> dict[str, str]:
        return {"key": self.key, "signature": base64.b64encode(self.value).decode("ascii")}

    @classmethod
    def parse(cls, document: Any) -> Self:
        """FormatError."""
        try:
            key, value = document["key"], base64.b64decode(document["signature"], validate=True)
            if len(value) == SIGNATURE_BYTES and ChunkId.is_id(key):
                return cls(KeyId(key), value)
        except (TypeError, KeyError, ValueError):  # binascii.Error is one
            pass
        expected = "the id of a key in hex, and 64 bytes in base64"
        raise FormatError("signature", expected=expected, found=repr(document)[:80])

    @classmethod
    def parse_all(cls, documents: Any) -> tuple[Self, ...]:
        """A list of them, as it is kept and sent; FormatError also for too many."""
        if not isinstance(documents, list) or len(documents) > SIGNATURE_LIMIT:
            expected = f"a list of up to {SIGNATURE_LIMIT}"
            raise FormatError("signatures", expected=expected, found=repr(documents)[:80])
        return tuple(map(cls.parse, documents))


def added(held: Sequence[Signature], more: Sequence[Signature]) -> tuple[Signature, ...]:
    """Signatures of one name and image, and more of the same, the newest last; the oldest go when they are too many."""
    kept = [signature for signature in held if signature not in more]
    return tuple([*kept, *dict.fromkeys(more)][-SIGNATURE_LIMIT:])


def entity_tag(image: ChunkId, signatures: Sequence[Signature]) -> str:
    """What changes when a name stands for something else, or is signed anew: an HTTP ETag, with its quotes.

    The id alone for an image that nobody signed.
    """
    text = "".join(f"{signature.key}{signature.value.hex()}" for signature in signatures)
    more = f".{ChunkId.of(text.encode()).hex()[:16]}" if text else ""
    return f'"{image}{more}"'


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key, as its 32 bytes."""

    raw: bytes

    @property
    def id(self) -> KeyId:
        return KeyId(hashlib.sha256(_DER_PREFIX + self.raw).hexdigest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """From 64 hex digits, as a command tells the node daemon. FormatError."""
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            raw = b""
        if len(raw) != _KEY_BYTES:
            raise FormatError("public key", expected=f"{_KEY_BYTES} bytes in hex", found=repr(text)[:80])
        return cls(raw)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a PEM file. OSError, SignatureError; needs no library, so that `run` starts quickly."""
        with open_regular(path) as file:
            _, begins, rest = file.read(_FILE_LIMIT_BYTES).partition(_BEGIN)
        body, ends, _ = rest.partition(_END)
        try:
            der = base64.b64decode(b"".join(body.split()), validate=True) if begins and ends else b""
        except binascii.Error:
            der = b""
        if not der.startswith(_DER_PREFIX) or len(der) != len(_DER_PREFIX) + _KEY_BYTES:
            raise SignatureError(f"{path} is no Ed25519 public key in PEM", hint=_HOW)
        return cls(der[len(_DER_PREFIX) :])

    def verifies(self, signature: Signature, name: str, image: ChunkId) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature.value, signed_text(name, image))
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """An Ed25519 private key. It is never sent, shown, or kept anywhere."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def read(cls, path: Path) -> Self:
        """From an unencrypted PEM file. OSError, SignatureError."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        with open(path, "rb") as file:  # a pipe as well: who signs waits for what gives the key
            raw = file.read(_FILE_LIMIT_BYTES)
        try:
            key = load_pem_private_key(raw, password=None)
        except TypeError:
            hint = f"`openssl pkey -in {path} -out PLAIN` decrypts it; keep that where only you can read it"
            raise SignatureError(f"the key in {path} is encrypted", hint=hint) from None
        except (ValueError, UnsupportedAlgorithm):
            raise SignatureError(f"{path} is no private key in PEM", hint=_HOW) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise SignatureError(f"the key in {path} is not an Ed25519 one", hint=_HOW)
        return cls(key)

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, name: str, image: ChunkId) -> Signature:
        """The signature of this image under this name, which is its full one."""
        return Signature(self.public.id, self._key.sign(signed_text(name, image)))


class Trust:
    """The keys of which one must have signed an image. Without keys there is no such requirement. Threads may share it.

    A signature that is right stays so: an older image that was signed under the same name is accepted, too.
    """

    def __init__(self, keys: Iterable[PublicKey] = ()) -> None:
        self._keys = {key.id: key for key in keys}

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """From PEM files. OSError, SignatureError."""
        return cls(PublicKey.read(path) for path in paths)

    @classmethod
    def parse(cls, keys: Any) -> Self:
        """From `keys` of another process; None is no requirement. FormatError."""
        if keys is None:
            return cls()
        if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
            raise FormatError("required keys", expected="a list of public keys in hex", found=repr(keys)[:80])
        return cls(map(PublicKey.parse, keys))

    def keys(self) -> list[str]:
        """For `parse`."""
        return [key.raw.hex() for key in self._keys.values()]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accepts(self, name: str, image: ChunkId, signatures: Iterable[Signature]) -> bool:
        """Whether one of the keys has signed this image under this name, or none has to."""
        if not self._keys:
            return True
        own = ((self._keys.get(signature.key), signature) for signature in signatures)
        return any(key is not None and key.verifies(signature, name, image) for key, signature in own)

    def check(self, name: str, image: ChunkId, signatures: Sequence[Signature]) -> None:
        """SignatureError unless this `accepts` it. The name is the full one; "" for an image that has none."""
        if self.accepts(name, image, signatures):
            return
        what = f"image {name or image}"
        required = ", ".join(key[:16] for key in self._keys)
        if not name:
            hint = "a signature is of a name: ask for the image by its name"
            raise SignatureError(f"{what} has no name here, so no signature can be checked", hint=hint)
        again = f"its publisher signs it with `pvisor image sign {name} --key FILE --server URL`, then pull it again"
        if not signatures:
            raise SignatureError(f"{what}, id {image}, is not signed, and a signature is required", hint=again)
        if all(signature.key not in self._keys for signature in signatures):
            found = ", ".join(signature.key[:16] for signature in signatures)
            message = f"{what}, id {image}, is not signed by a required key ({required}), but by {found}"
            raise SignatureError(message, hint=f"require the key of its publisher, or {again}")
        raise SignatureError(
            f"{what}, id {image}: the signature is not of this image under this name: "
            "the name was moved to another image, or the image was given another name",
            hint=f"find out who did that before you run it; if it is meant so, {again}",
        )
