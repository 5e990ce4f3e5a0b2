import pytest

from tandem_contract.response_ids import has_tag_of, new_response_id, response_id_in

FOREIGN = ("", "resp_", "resp_1", "resp_" + "0" * 32, "chatcmpl-1", "x" * 100_000)


def test_an_id_tells_the_backend_that_it_was_made_for_and_no_other() -> None:
    ids = {new_response_id("decode-1") for _ in range(100)}
    assert len(ids) == 100
    for made in ids:
        assert made.startswith("resp_")
        assert has_tag_of(made, "decode-1")
        assert not has_tag_of(made, "decode-2")
        # Pushed hand-offs append the attempt's id.
        assert has_tag_of(f"{made}-r-1", "decode-1")


def test_the_name_is_not_in_the_id() -> None:
    assert "10.0.0.7" not in new_response_id("10.0.0.7:8000")


@pytest.mark.parametrize("foreign", FOREIGN)
def test_an_id_of_another_origin_belongs_to_no_backend(foreign: str) -> None:
    assert not has_tag_of(foreign, "decode-1")


@pytest.mark.parametrize(
    ("target", "response_id"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1?stream=true", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses", ""),
        ("/v1/responses?x=/v1/responses/1", ""),
        ("/v1/responses/", ""),
        ("/v1/models", ""),
    ],
)
def test_the_id_in_a_path(target: str, response_id: str) -> None:
    assert response_id_in(target) == response_id
