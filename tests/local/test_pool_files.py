from pathlib import Path

import pytest

from tandem_contract.documents import DocumentError
from tandem_local.pool_files import read_pool_sets

POOL = """\
apiVersion: tandem.dev/v1alpha1
kind: PrefillPool
metadata: {name: %s}
spec:
  model: {name: m, source: {path: /models/m}}
  engine: {type: torch}
  accelerator: {count: 0}
"""


def test_files_and_directories_together(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/b.yaml").write_text(POOL % "b")
    (tmp_path / "dir/a.yml").write_text(POOL % "a")
    (tmp_path / "dir/notes.txt").write_text("not: [yaml")
    single = tmp_path / "c.yaml"
    single.write_text(f"{POOL % 'c'}---\n{POOL % 'd'}---\n")
    pool_sets = read_pool_sets([tmp_path / "dir", single, single])
    assert [pool_set.name for pool_set in pool_sets] == ["a", "b", "c", "d"]


def test_a_pool_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text(POOL % "same")
    with pytest.raises(DocumentError, match=r"two\.yaml:3: .*one\.yaml:3"):
        read_pool_sets([tmp_path])


def test_no_pools_at_all(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"no \*\.yaml or \*\.yml"):
        read_pool_sets([tmp_path])
    (tmp_path / "empty.yaml").write_text("# nothing\n---\n")
    with pytest.raises(DocumentError, match="contains no PrefillPool or DecodePool"):
        read_pool_sets([tmp_path])
