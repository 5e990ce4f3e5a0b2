"""Chat templates: where their text comes from, and what they may do."""

from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import SecurityError

from tandem_contract.chat_templates import (
    TEMPLATE_FILE,
    special_tokens,
    template_environment,
    template_source,
)


def test_a_file_of_its_own_wins_over_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / TEMPLATE_FILE
    config = {
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    }
    assert template_source(file, config) == "d"
    file.write_text("own")
    assert template_source(file, config) == "own"


@pytest.mark.parametrize("config", [{}, {"chat_template": []}, {"chat_template": 7}])
def test_without_a_usable_template_there_is_none(tmp_path: Path, config: dict[str, object]) -> None:
    assert template_source(tmp_path / TEMPLATE_FILE, config) is None


def test_special_tokens_are_text_or_objects() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "other": "x"}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_json_has_no_html_escapes() -> None:
    template = template_environment().from_string("{{ value | tojson }}")
    assert template.render(value={"a": "<ü>"}) == '{"a": "<ü>"}'


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "ü", "a": [1, 2]}'),
        ("true", '{"b": "\\u00fc", "a": [1, 2]}'),
        ("ensure_ascii=true, sort_keys=true", '{"a": [1, 2], "b": "\\u00fc"}'),
        ("separators=(',', ':')", '{"b":"ü","a":[1,2]}'),
        ("false, 1", '{\n "b": "ü",\n "a": [\n  1,\n  2\n ]\n}'),
        ("indent=1", '{\n "b": "ü",\n "a": [\n  1,\n  2\n ]\n}'),
    ],
)
def test_json_is_written_with_the_options_that_transformers_has(options: str, text: str) -> None:
    template = template_environment().from_string(f"{{{{ value | tojson({options}) }}}}")
    assert template.render(value={"b": "ü", "a": [1, 2]}) == text


def test_a_block_that_marks_what_was_generated_is_a_part_of_the_prompt() -> None:
    template = template_environment().from_string(
        "{% for m in messages %}{% generation %}{% set x = loop.index %}{{ x }}{{ m }}"
        "{% endgeneration %}{{ x }}{% endfor %}"
    )
    assert template.render(messages=["a", "b"], x="-") == "1a-2b-"


def test_a_template_can_refuse_and_cannot_reach_the_interpreter() -> None:
    environment = template_environment()
    with pytest.raises(jinja2.TemplateError, match="no tools"):
        environment.from_string("{{ raise_exception('no tools') }}").render()
    with pytest.raises(SecurityError):
        environment.from_string("{{ ''.__class__.__mro__ }}").render()
