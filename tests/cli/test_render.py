import json
from pathlib import Path

from click.testing import CliRunner

from tandem_cli.main import main
from tandem_contract.documents import load_documents
from tandem_local.pool_files import read_pool_sets
from tandem_operator.pods.manifests import pods

EXAMPLE = Path(__file__).parents[2] / "examples/quickstart.yaml"


def rendered(*args: str) -> str:
    result = CliRunner().invoke(main, ["render", "-f", str(EXAMPLE), *args])
    assert result.exit_code == 0
    return result.output


def test_yaml_and_json_are_the_pods_that_up_runs(tmp_path: Path) -> None:
    expected = [pod for pool_set in read_pool_sets([EXAMPLE]) for pod in pods(pool_set)]
    assert expected
    file = tmp_path / "pods.yaml"
    file.write_text(rendered())
    assert [document.data for document in load_documents(file)] == expected
    pod_list = json.loads(rendered("-o", "json"))
    assert (pod_list["kind"], pod_list["items"]) == ("List", expected)
