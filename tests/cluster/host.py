"""What a kubelet changes on the machine it runs on, remembered before and put back after."""

import json
import time
from pathlib import Path

# kubelet sets these for the whole machine.
_SETTINGS = (
    *("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_CGROUPS = ("kubepods", "k8s.io")
_EMPTY_SECONDS = 10


def runs_a_kubelet() -> bool:
    """Whether pods' control groups are there: a second kubelet would fight over them."""
    return bool(_groups("kubepods"))


def remember(record: Path) -> None:
    """Write what `restore` needs."""
    values = {
        name: path.read_text().strip()
        for name in _SETTINGS
        if (path := Path("/proc/sys") / name).exists()
    }
    theirs = [name for name in _CGROUPS if _groups(name)]
    record.write_text(json.dumps({"settings": values, "cgroups": theirs}))


def restore(record: Path) -> None:
    """Put back what `remember` saw, and remove the control groups that were not there."""
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
    """The control groups called `name`, in one hierarchy or, with version 1, in each."""
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
                    # A process just killed may still be leaving it.
                    time.sleep(0.05)
