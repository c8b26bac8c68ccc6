"""`pvisor doctor`."""

from __future__ import annotations

import click

from cli.common import Settings, command_options


@click.command(short_help="Check what this host can do.")
@command_options
def doctor(settings: Settings) -> int:
    """Check this host: root, FUSE, EROFS, overlayfs, directories, server, and what VMs need.

    Exit code 1 when something is missing that is not for VMs alone.

    \b
    Examples:
      pvisor doctor
      pvisor doctor --server http://store:7878
    """
    from fuse import doctor as host
    from vmm import doctor as vms

    checks = [*host.examine(settings.config), *vms.examine(settings.config)]

    def text() -> str:
        lines = []
        for check in checks:
            found = "ok  " if check.ok else "no  " if check.optional else "FAIL"
            lines.append(f"{found}  {check.name}: {check.detail}")
            if check.hint and not check.ok:
                lines.append(f"      hint: {check.hint}")
        return "\n".join(lines)

    failed = [check for check in checks if not check.ok and not check.optional]
    settings.emit(
        {
            "ok": not failed,
            "checks": [
                {
                    "name": check.name,
                    "ok": check.ok,
                    "optional": check.optional,
                    "detail": check.detail,
                    "hint": "" if check.ok else check.hint,
                }
                for check in checks
            ],
        },
        text,
    )
    return 1 if failed else 0
