"""What the root of a stage may do: the capabilities that podman gives by default."""

from __future__ import annotations

from fuse import linux

# Numbers of linux/capability.h. With none of the others, root can neither mount nor trace what is not its own, opens
# no device and no socket below TCP and UDP, and can not leave its namespaces.
KEPT = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "sys_chroot": 18,
    "setfcap": 31,
}


def limit(last: int) -> None:
    """Programs executed from here on get at most these, of the capabilities 0 to `last` that the kernel knows."""
    linux.limit_capabilities(frozenset(KEPT.values()), last)
