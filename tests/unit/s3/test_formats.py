from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imaged.chunkstore.pack import PACK_HEADER_BYTES
from imaged.errors import FormatError, InvalidNameError
from imaged.frame import Codec
from imaged.ids import ChunkId
from imaged.s3 import condemnedlist, packindex
from imaged.s3.address import BucketAddress, Patience, endpoint
from imaged.s3.condemnedlist import CondemnedList, Copy
from imaged.s3.names import Version, current, directory, parse_key
from imaged.s3.packindex import Row
from imaged.s3.packtable import id_before, new_id

_ids = st.binary(min_size=32, max_size=32).map(ChunkId)


@st.composite
def _contents(draw: st.DrawFn) -> tuple[int, list[Row]]:
    rows: list[Row] = []
    end = PACK_HEADER_BYTES
    for _ in range(draw(st.integers(0, 5))):
        start = end + draw(st.integers(0, 9))
        size, payload = draw(st.integers(1, 1 << 20)), draw(st.integers(1, 1 << 20))
        row = Row(draw(_ids), start, size, payload, draw(st.sampled_from([Codec.RAW, Codec.ZSTD])))
        rows.append(row)
        end = row.end
    return end + draw(st.integers(0, 9)), rows


@settings(max_examples=25)
@given(_contents())
def test_a_pack_index_comes_back_as_it_was(contents: tuple[int, list[Row]]) -> None:
    length, rows = contents
    assert packindex.parse(packindex.pack(length, rows)) == (length, tuple(rows))


@settings(max_examples=25)
@given(_contents(), st.data())
def test_a_damaged_pack_index_is_refused(contents: tuple[int, list[Row]], data: st.DataObject) -> None:
    raw = bytearray(packindex.pack(*contents))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        packindex.parse(bytes(raw))


def test_a_pack_index_names_only_frames_that_can_be_there() -> None:
    chunk = ChunkId.of(b"x")
    good = Row(chunk, 16, 100, 50, Codec.ZSTD)
    for rows, length in (
        ([good], good.end - 1),
        ([good._replace(offset=15)], 1000),
        ([good, good], 1000),
        ([good._replace(size_bytes=0)], 1000),
        ([good._replace(codec=Codec.MISSING)], 1000),
        ([good._replace(payload_bytes=2 << 20)], 4 << 20),
    ):
        with pytest.raises(FormatError):
            packindex.parse(packindex.pack(length, rows))
    for cut in (b"", packindex.pack(1000, [good])[:-1], packindex.pack(1000, [good]) + b"x"):
        with pytest.raises(FormatError):
            packindex.parse(cut)


def test_a_condemned_list_comes_back_as_it_was() -> None:
    chunks = tuple(ChunkId.of(bytes([n])) for n in range(3))
    listed = CondemnedList((new_id(), new_id()), chunks[:2], (Copy(chunks[2], new_id()),))
    raw = condemnedlist.pack(listed)
    assert condemnedlist.parse(raw) == listed
    for bad in (raw[:-1], raw + b"x", b"", b"{}\n", b"[1]\n" + raw):
        with pytest.raises(FormatError):
            condemnedlist.parse(bad)


@settings(max_examples=50)
@given(st.text(alphabet="ab/:.-_@%é ", min_size=1, max_size=20))
def test_any_name_has_a_key_of_its_own(name: str) -> None:
    place = directory("images", name)
    assert place.count("/") == 3
    assert parse_key(f"{place}000000000007-ab.json") == ("images", name, Version(7, "-ab", "json"))


def test_other_keys_are_none_of_names() -> None:
    for key in (
        "refs/images/x",
        "refs/images/x/7.json",
        "refs/images/x/000000000007.txt",
        "packs/images/x/000000000007.json",
        "refs/images/x/00000000000x.json",
        "refs/images/x/000000000007ab.json",
    ):
        assert parse_key(key) is None, key


def test_the_greatest_version_counts_and_no_claim() -> None:
    versions = [Version(2, "-b", "json"), Version(9, "-a", "claim"), Version(2, "-a", "gone"), Version(1, "", "json")]
    assert current(versions) == Version(2, "-b", "json")
    assert current([Version(9, "-a", "claim")]) is None


def test_ids_of_packs_are_in_the_order_of_time() -> None:
    assert new_id() < id_before(1e10)
    assert new_id() > id_before(1e9)


def test_addresses() -> None:
    address = BucketAddress.parse("s3://my-bucket/some/prefix/")
    assert (address.bucket, address.prefix, str(address)) == ("my-bucket", "some/prefix", "s3://my-bucket/some/prefix")
    assert address.key("packs/x") == "some/prefix/packs/x"
    assert BucketAddress.parse("s3://my-bucket").key("packs/x") == "packs/x"
    for bad in ("s3://", "s3:///x", "s3:/b/x", "s3://b", "s3://bkt/a//b", "s3://bkt/../x", "s3://bkt/a b", "/tmp"):
        with pytest.raises(InvalidNameError):
            BucketAddress.parse(bad)


def test_an_endpoint_is_shown_without_its_credentials() -> None:
    assert endpoint({"AWS_ENDPOINT_URL_S3": "https://me:secret@s3.example:9000/x/"}) == "https://s3.example:9000/x"
    assert endpoint({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}) == "http://127.0.0.1:1"
    assert endpoint({}) == ""


def test_patience_from_the_environment() -> None:
    found = Patience.resolve({"PVISOR_S3_TIMEOUT_S": "1.5", "PVISOR_S3_ATTEMPTS": "2", "PVISOR_S3_SETTLE_S": "0"})
    assert (found.timeout_s, found.attempts, found.settle_s, found.poll_s) == (1.5, 2, 0.0, 5.0)
    for name, bad in (("POLL_S", "x"), ("LEASE_S", "0"), ("ATTEMPTS", "0"), ("TIMEOUT_S", "inf"), ("WAIT_S", "nan")):
        with pytest.raises(InvalidNameError):
            Patience.resolve({f"PVISOR_S3_{name}": bad})
