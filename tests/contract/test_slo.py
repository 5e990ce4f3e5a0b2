"""Objectives of models, as files state them."""

from pathlib import Path

import pytest

from tandem_contract.config import load_router_config
from tandem_contract.documents import DocumentError
from tandem_contract.slo import Slo


def slos(tmp_path: Path, text: str) -> dict[str, Slo]:
    file = tmp_path / "router.yaml"
    file.write_text(text)
    return load_router_config(file).slo


def test_each_model_has_its_objectives(tmp_path: Path) -> None:
    text = """
slo:
  org/Model-2.5: {ttft: 2s, itl: 50ms, attainment: 1}
  adapter:
    ttft: 500ms
"""
    assert slos(tmp_path, text) == {
        "org/Model-2.5": Slo(2.0, 0.05, 1.0),
        "adapter": Slo(0.5, None, 0.9),
    }


@pytest.mark.parametrize("text", ["{}", "slo:", "slo: {}"])
def test_there_are_none_unless_stated(tmp_path: Path, text: str) -> None:
    assert slos(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("slo: 2s", 1, "slo: is no mapping of models"),
        ("slo: [m]", 1, "slo: is no mapping of models"),
        ("slo:\n  m: 2s", 2, "slo.m: states no objective"),
        ("slo:\n  m: {}", 2, "slo.m: states no objective"),
        ("slo:\n  m:\n    attainment: 0.9", 2, "slo.m: states no objective"),
        ("slo:\n  7: {ttft: 2s}", 1, "slo: 7 is no name of a model"),
        ("slo:\n  m:\n    ttft: 2", 3, 'slo.m.ttft: 2 has no unit: write "30s" or "250ms"'),
        ("slo:\n  m:\n    ttft: soon", 3, "slo.m.ttft: "),
        ("slo:\n  m:\n    itl: 0s", 3, "slo.m.itl: no request meets a time of 0"),
        ("slo:\n  m: {ttft: 2s}\n  M.5:\n    itl: 0ms", 4, "slo.M.5.itl: no request meets"),
        ("slo:\n  m:\n    ttft: 2s\n    tpot: 5ms", 4, "slo.m.tpot: is an unknown field"),
        *(
            (f"slo:\n  m:\n    ttft: 2s\n    attainment: {share}", 4, "slo.m.attainment: ")
            for share in ("0", "1.1", "-1", "99%", "yes", "true", "")
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    with pytest.raises(DocumentError) as raised:
        slos(tmp_path, text)
    assert f"router.yaml:{line}: {message}" in str(raised.value)
