"""What VMs are called: numbers that neither a VM nor a snapshot has."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.ids import ChunkId
from tests.support.parked import add_snapshot
from tests.unit.vmm.test_vms import add
from vmm.errors import VmArgumentError
from vmm.names import checked, free_of_snapshots, numbered
from vmm.vms import Vms

IMAGE = ChunkId.parse("ab" * 32)


@pytest.mark.parametrize("name", ["", ".", "-a", "a/b", "a b", "x" * 64, "\0", "\udcff", "x" * 10**6, None, 7])
def test_what_is_no_name_is_told_in_one_short_line(name: object) -> None:
    with pytest.raises(VmArgumentError, match="not a VM name") as caught:
        checked(name)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_numbers_pass_over_what_vms_and_snapshots_are_called(tmp_path: Path) -> None:
    vms = Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))
    assert list(islice(free_of_snapshots(vms.config, "web"), 2)) == ["web-1", "web-2"]
    long = "y" * 63
    with ChunkStore.open(vms.config.store) as store:
        for name in ("web-2", "web-3", "y" * 61 + "-1"):
            add_snapshot(store, name, IMAGE, memory=bytes(1 << 20))
        with store.index.write("spoil") as txn:
            store.index.put(txn, "snapshots", b"web-4", b"{")
    add(vms, "web-1")
    among = free_of_snapshots(vms.config, "web")
    assert [add(vms, "web", among) for _ in range(2)] == ["web-5", "web-6"]
    assert next(free_of_snapshots(vms.config, long)) == "y" * 61 + "-2"
    assert next(numbered(long)) == "y" * 61 + "-1"
