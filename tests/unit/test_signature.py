"""Keys, signatures, and what is accepted; the openssl command is the judge of the bytes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from imaged.errors import FormatError, SignatureError
from imaged.ids import ChunkId
from imaged.signature import SIGNATURE_LIMIT, PublicKey, Signature, SigningKey, Trust, added, signed_text
from tests.support.keys import KeyPair, make_keys

NAME = "registry.test:5000/team/app:v1"
IMAGE, OTHER = ChunkId.of(b"one"), ChunkId.of(b"two")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("keys"), "team")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("keys"), "stranger")


def test_openssl_verifies_what_is_signed_here(keys: KeyPair, tmp_path: Path) -> None:
    signature = SigningKey.read(keys.private).sign(NAME, IMAGE)
    (tmp_path / "text").write_text(f"pvisor image v1\n{NAME}\n{IMAGE}\n")
    (tmp_path / "signature").write_bytes(signature.value)
    openssl = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(keys.public), "-rawin"]
    command = [*openssl, "-in", str(tmp_path / "text"), "-sigfile", str(tmp_path / "signature")]
    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"Signature Verified")
    (tmp_path / "text").write_bytes(signed_text(NAME, OTHER))
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_what_openssl_signs_is_accepted_here(keys: KeyPair, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(signed_text(NAME, IMAGE))
    openssl = ["openssl", "pkeyutl", "-sign", "-inkey", str(keys.private), "-rawin"]
    value = subprocess.run([*openssl, "-in", str(tmp_path / "text")], capture_output=True, check=True).stdout
    key = PublicKey.read(keys.public)
    Trust([key]).check(NAME, IMAGE, [Signature(key.id, value)])


def test_a_key_goes_by_the_digest_that_openssl_gives(keys: KeyPair) -> None:
    command = f"openssl pkey -pubin -in {keys.public} -outform DER | openssl dgst -sha256 -r"
    digest = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.split()[0]
    assert PublicKey.read(keys.public).id == SigningKey.read(keys.private).public.id == digest


def test_any_of_the_required_keys_is_enough(keys: KeyPair, stranger: KeyPair) -> None:
    signatures = [SigningKey.read(pair.private).sign(NAME, IMAGE) for pair in (stranger, keys)]
    both = Trust.read([keys.public, stranger.public])
    for signature in signatures:
        both.check(NAME, IMAGE, [signature])
    Trust.read([keys.public]).check(NAME, IMAGE, signatures)
    assert Trust.parse(both.keys()).accepts(NAME, IMAGE, signatures[:1])


def test_without_a_required_key_anything_goes(keys: KeyPair) -> None:
    for trust in (Trust(), Trust.parse(None), Trust.read([])):
        assert not trust
        trust.check("", IMAGE, [])


@pytest.mark.parametrize(
    ("name", "image", "signed_name", "signed_image", "by", "message"),
    [
        (NAME, IMAGE, NAME, IMAGE, "nobody", "is not signed, and a signature is required"),
        (NAME, IMAGE, NAME, IMAGE, "stranger", "is not signed by a required key"),
        (NAME, OTHER, NAME, IMAGE, "team", "the name was moved to another image"),
        ("app:v1", IMAGE, NAME, IMAGE, "team", "the name was moved to another image, or the image was given another"),
        ("", IMAGE, NAME, IMAGE, "team", "has no name here"),
    ],
)
def test_what_is_refused_and_why(
    name: str,
    image: ChunkId,
    signed_name: str,
    signed_image: ChunkId,
    by: str,
    message: str,
    keys: KeyPair,
    stranger: KeyPair,
) -> None:
    pair = {"team": keys, "stranger": stranger, "nobody": None}[by]
    signatures = [] if pair is None else [SigningKey.read(pair.private).sign(signed_name, signed_image)]
    with pytest.raises(SignatureError) as refused:
        Trust.read([keys.public]).check(name, image, signatures)
    assert message in refused.value.message
    assert refused.value.hint


def test_a_signature_that_was_changed_is_refused(keys: KeyPair) -> None:
    trust, signature = Trust.read([keys.public]), SigningKey.read(keys.private).sign(NAME, IMAGE)
    for position in range(0, 64, 7):
        changed = bytearray(signature.value)
        changed[position] ^= 1
        assert not trust.accepts(NAME, IMAGE, [Signature(signature.key, bytes(changed))])
    assert not trust.accepts(NAME, IMAGE, [Signature(signature.key, bytes(64))])
    # A wrong one beside it does no harm.
    assert trust.accepts(NAME, IMAGE, [Signature(signature.key, bytes(64)), signature])


def test_a_signature_is_what_its_json_says(keys: KeyPair) -> None:
    signature = SigningKey.read(keys.private).sign(NAME, IMAGE)
    assert Signature.parse(signature.to_json()) == signature
    good = signature.to_json()
    for wrong in (
        None,
        [],
        "text",
        {},
        {"key": good["key"]},
        {**good, "key": [*good["key"]]},
        {**good, "key": good["key"].upper()},
        {**good, "signature": "AAAA"},
        {**good, "signature": good["signature"] + "!"},
        {**good, "signature": None},
    ):
        with pytest.raises(FormatError):
            Signature.parse(wrong)
    with pytest.raises(FormatError):
        Signature.parse_all([good] * (SIGNATURE_LIMIT + 1))


def test_the_newest_signatures_stay() -> None:
    made = [
        Signature(PublicKey(bytes([number]) * 32).id, bytes([number]) * 64) for number in range(SIGNATURE_LIMIT + 2)
    ]
    assert added(made[:2], made[1:3]) == tuple(made[:3])
    assert added(made[:SIGNATURE_LIMIT], made[SIGNATURE_LIMIT:]) == tuple(made[2:])
    assert added(made[:3], made[:1]) == (made[1], made[2], made[0])


def test_files_that_are_no_such_keys(keys: KeyPair, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    other = subprocess.run(["openssl", "genpkey", "-algorithm", "x25519"], capture_output=True, check=True).stdout
    public = ["openssl", "pkey", "-pubout"]
    other_public = subprocess.run(public, input=other, capture_output=True, check=True).stdout
    for content in (b"", b"text", b"\xff\0", keys.private.read_bytes(), other_public, keys.public.read_bytes()[:60]):
        wrong.write_bytes(content)
        with pytest.raises(SignatureError, match="is no Ed25519 public key"):
            PublicKey.read(wrong)
    for content, message in (
        (b"", "is no private key"),
        (keys.public.read_bytes(), "is no private key"),
        (other, "is not an Ed25519 one"),
    ):
        wrong.write_bytes(content)
        with pytest.raises(SignatureError, match=message):
            SigningKey.read(wrong)
    encrypt = ["openssl", "pkey", "-in", str(keys.private), "-aes256", "-passout", "pass:secret"]
    wrong.write_bytes(subprocess.run(encrypt, capture_output=True, check=True).stdout)
    with pytest.raises(SignatureError, match="is encrypted"):
        SigningKey.read(wrong)
    for missing in (PublicKey.read, SigningKey.read):
        with pytest.raises(FileNotFoundError):
            missing(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            PublicKey.read(path)
    with pytest.raises(SignatureError, match="no private key"):
        SigningKey.read(Path("/dev/zero"))


def test_a_private_key_may_come_from_a_pipe(keys: KeyPair, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["sh", "-c", f"cat {keys.private} > {tmp_path}/pipe"]):
        assert SigningKey.read(tmp_path / "pipe").public == PublicKey.read(keys.public)


def test_what_a_command_says_of_keys_is_checked() -> None:
    for wrong in ([], "text", [1], ["zz"], ["00" * 31], {}):
        with pytest.raises(FormatError):
            Trust.parse(wrong)
