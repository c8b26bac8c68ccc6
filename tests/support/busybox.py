"""A small root directory with a static busybox, as the lower of a stage."""

from __future__ import annotations

import shutil
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
_APPLETS = """
    sh cat chmod cp cut dd echo env false grep head hostname id ip kill ln ls mkdir mknod mount mv nc ps pwd readlink
    rm seq sha256sum sleep stat stty tail test touch tr true tty umask umount uname wc yes
"""

PASSWD = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:Agent:/home/agent:/bin/sh\n"
GROUP = "root:x:0:\nagent:x:1000:\nstaff:x:50:agent\nwheel:x:10:root,agent\n"


def busybox_root(path: Path) -> Path:
    """Makes `path` with /bin, /etc, /root, /tmp; /proc, /dev and /sys are for the stage to make."""
    (path / "bin").mkdir(parents=True)
    shutil.copy2(BUSYBOX, path / "bin/busybox")
    for applet in _APPLETS.split():
        (path / "bin" / applet).symlink_to("busybox")
    for name, mode in (("etc", 0o755), ("root", 0o700), ("home/agent", 0o755), ("tmp", 0o1777)):
        (path / name).mkdir(parents=True)
        (path / name).chmod(mode)
    (path / "etc/passwd").write_text(PASSWD)
    (path / "etc/group").write_text(GROUP)
    (path / "etc/image-file").write_text("from the image\n")
    return path
