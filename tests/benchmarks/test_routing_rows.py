"""The table of all rows, and the files that keep what was run."""

from pathlib import Path

import pytest
from benchmarks.routing_rivals import BOUND, PICKER, UNIFIED, Row
from benchmarks.routing_rows import Trials, cases, main, show
from click.testing import CliRunner

from tests.epp.simulation.regimes import REGIMES


def row(ttft: float, itl: float, goodput: float) -> Row:
    return Row(ttft / 10, ttft, ttft / 2, itl, [goodput, goodput, goodput], 0.0, 0.5)


def test_each_regime_and_trace_has_a_row_at_both_speeds() -> None:
    names = [case.name for case in cases([Path("mooncake.jsonl"), Path("azure.csv")])]
    assert len(names) == len(set(names)) == 2 * len(REGIMES) + 6
    assert "mooncake on 6 + 4 2 ×" in names
    assert "azure on 6 + 4 2 ×" not in names


def test_regimes_that_only_the_picker_notices_are_one_to_rivals() -> None:
    by_name = {case.name: case for case in cases([])}
    hidden, plain = by_name["unknown max_tokens 2 ×"], by_name["plain 2 ×"]
    assert hidden.trial("Dynamo", 3) == plain.trial("Dynamo", 3)
    assert hidden.trial(PICKER, 3) != plain.trial(PICKER, 3)


def test_only_seeds_of_all_routers_count(capsys: pytest.CaptureFixture[str]) -> None:
    case, rivals, picker = next(iter(cases([]))), Trials(None), Trials(None)
    for seed in range(3):
        picker.add(case.trial(PICKER, seed), row(8.0, 0.030, 0.96))
        for name in case.rivals:
            # The rivals' last seed is missing.
            if seed < 2:
                rivals.add(case.trial(name, seed), row(10.0, 0.020, 0.8))
    show([case], 3, rivals, picker)
    out = capsys.readouterr().out
    cells = [cell.strip() for cell in out.splitlines()[-2].split("│")]
    assert cells[1:5] == ["plain 1 ×", "2", "1.200 1.200 1.200", "1.25 1.25 1.25"]
    assert cells[5:8] == ["none near (30 ms)", "0.800 (0.80 s)", "0.800 (8.00 s)"]


def test_the_bound_limits_what_is_possible(capsys: pytest.CaptureFixture[str]) -> None:
    case, rivals, picker = next(iter(cases([]))), Trials(None), Trials(None)
    picker.add(case.trial(PICKER, 0), row(8.0, 0.030, 0.8))
    rivals.add(case.trial(BOUND, 0), row(8.0, 0.030, 0.88))
    for name in case.rivals:
        rivals.add(case.trial(name, 0), row(8.0, 0.040, 0.8))
    show([case], 1, rivals, picker)
    assert "1.10 1.25 1.25" in capsys.readouterr().out


def test_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    kept, own = tmp_path / "rivals.jsonl", tmp_path / "picker.jsonl"
    case = next(case for case in cases([]) if case.name == "plain 1 ×")
    assert case.comparison is UNIFIED
    rivals, picker = Trials(kept), Trials(own)
    for name in case.rivals:
        rivals.add(case.trial(name, 0), row(8.0, 0.040, 0.8))
    picker.add(case.trial(PICKER, 0), row(8.0, 0.030, 0.8))
    assert Trials(kept).rows == rivals.rows
    before = kept.read_text(), own.read_text()
    arguments = ["--seeds", "1", "--row", "plain 1", "--keep", str(kept), "--picker", str(own)]
    result = CliRunner().invoke(main, [*arguments, "--processes", "1"])
    assert result.exit_code == 0, result.output
    assert "plain 1 ×" in result.output
    assert (kept.read_text(), own.read_text()) == before
