"""Chat templates as model directories bring them."""

import json
from pathlib import Path

import pytest

from tandem_engine.body import ApiError
from tandem_engine.chat import ChatTemplate, ChatTemplateUnusable

HELLO = [{"role": "user", "content": "hello"}]


def _template(directory: Path, **config: object) -> ChatTemplate:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate(directory)


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file: {{ messages[0].content }}")
    template = _template(tmp_path, chat_template="other", bos_token={"content": "<s>"})
    assert template.render(HELLO, {}) == "<s>file: hello"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert _template(tmp_path, chat_template=named).render(HELLO, {}) == "d"


def test_blocks_leave_no_blank_lines_and_json_stays_readable(tmp_path: Path) -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m | tojson }}\n{% endif %}\n{% endfor %}"
    assert _template(tmp_path, chat_template=source).render(
        [{"role": "u", "content": "<ä>"}], {}
    ) == '{"role": "u", "content": "<ä>"}\n'  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
    ],
)
def test_a_template_that_refuses_is_a_400(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        _template(tmp_path, chat_template=source).render(HELLO, {})
    assert caught.value.status == 400


def test_without_a_template_every_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="no chat template"):
        ChatTemplate(tmp_path).render(HELLO, {})


def test_what_is_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateUnusable, match="line 2"):
        _template(tmp_path, chat_template="\n{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ChatTemplateUnusable, match="cannot read it"):
        ChatTemplate(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ChatTemplateUnusable, match="not a JSON object"):
        ChatTemplate(tmp_path)
