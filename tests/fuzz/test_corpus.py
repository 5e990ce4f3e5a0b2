"""Every input of the corpus, and so every input that has ever failed, passes its target."""

from pathlib import Path

import pytest

from .targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = [
    pytest.param(file, id=f"{file.parent.name}/{file.name}") for file in sorted(CORPUS.glob("*/*"))
]


@pytest.mark.parametrize("file", INPUTS)
def test_input_passes(file: Path) -> None:
    TARGETS[file.parent.name](file.read_bytes())


def test_every_target_has_a_corpus_and_takes_any_bytes() -> None:
    assert {file.name for file in CORPUS.iterdir()} == set(TARGETS)
    for check in TARGETS.values():
        for data in (b"", b"\0", b"\1", b"\2", b"\3", bytes(range(256))):
            check(data)
