"""Kernel settings and control groups that a kubelet changes: saved before, restored after."""

import json
import time
from pathlib import Path

# kubelet sets these sysctls for the whole machine.
_SETTINGS = (
    *("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_CGROUPS = ("kubepods", "k8s.io")
_EMPTY_SECONDS = 10


def runs_a_kubelet() -> bool:
    """Whether pods' control groups exist; a second kubelet would delete those of the first."""
    return bool(_groups("kubepods"))


def save(record: Path) -> None:
    """Write the current settings and the existing control groups to `record`."""
    values = {
        name: path.read_text().strip()
        for name in _SETTINGS
        if (path := Path("/proc/sys") / name).exists()
    }
    existing = [name for name in _CGROUPS if _groups(name)]
    record.write_text(json.dumps({"settings": values, "cgroups": existing}))


def restore(record: Path) -> None:
    """Restore the settings in `record`; remove the control groups that did not exist then."""
    if not record.exists():
        return
    before = json.loads(record.read_text())
    for name, value in before["settings"].items():
        path = Path("/proc/sys") / name
        if path.read_text().strip() != value:
            path.write_text(value)
    for name in _CGROUPS:
        if name not in before["cgroups"]:
            _remove(name)


def _groups(name: str) -> list[Path]:
    """The control groups called `name`: one with cgroup v2, one per hierarchy with v1."""
    top = Path("/sys/fs/cgroup")
    return [path for path in (top / name, *top.glob(f"*/{name}")) if path.is_dir()]


def _remove(name: str) -> None:
    deadline = time.monotonic() + _EMPTY_SECONDS
    while (groups := _groups(name)) and time.monotonic() < deadline:
        for group in groups:
            inner = sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True)
            for folder in (*inner, group):
                try:
                    folder.rmdir()
                except OSError:
                    # EBUSY while a process that was just killed still exits: try again.
                    time.sleep(0.05)
