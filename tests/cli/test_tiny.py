from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem_cli.main import main
from tandem_contract.documents import load_documents
from tandem_engine.weights import load_config

ROOT = Path(__file__).parents[2]


def test_the_written_model_can_be_loaded(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["tiny-model", str(tmp_path / "a/model")])
    assert result.exit_code == 0, result.output
    assert load_config(tmp_path / "a/model").vocab_size == 512


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    result = CliRunner().invoke(main, ["tiny-model", str(tmp_path)])
    assert (result.exit_code, result.output) == (
        2,
        f"error: {tmp_path} is not empty: serve the model in it, or name a new directory\n",
    )
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.parametrize("command", ["tiny-model", "demo"])
@pytest.mark.parametrize("seed", ["-1", "9223372036854775808"])
def test_a_seed_out_of_torchs_range_is_refused(tmp_path: Path, command: str, seed: str) -> None:
    directory = [str(tmp_path / "x")] if command == "tiny-model" else []
    result = CliRunner().invoke(main, [command, *directory, "--seed", seed])
    assert result.exit_code == 2
    assert "is not in the range" in result.output


def test_the_readme_uses_the_model_name_of_the_example() -> None:
    (pool, _) = load_documents(ROOT / "examples/quickstart.yaml")
    name = pool.data["spec"]["model"]["name"]
    assert f'"model": "{name}"' in (ROOT / "README.md").read_text()
