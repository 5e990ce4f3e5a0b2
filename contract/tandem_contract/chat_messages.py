"""Chat messages as vLLM gives them to a chat template: not as the client sent them.

The reference engine and the EPP's tokenizer render the same messages. Source: vLLM 0.32,
`vllm/renderers/chat_utils.py`; what it cuts from the system messages of one client is not
reproduced.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def template_message(
    message: Mapping[str, Any], texts: Sequence[str], *, has_part_lists: bool
) -> dict[str, Any]:
    """The message for the template. `texts`: those of its content, none if it has no content;
    `has_part_lists`: whether the template takes content as a list of parts.

    Raises ValueError for tool calls that vLLM refuses.
    """
    role = message.get("role")
    content: object = "\n".join(text for text in texts if text)
    # Most templates take the content of tool messages as a string only.
    if has_part_lists and role != "tool":
        content = [{"type": "text", "text": text} for text in texts]
    rendered = {"role": role, "content": content}
    if role == "assistant":
        rendered |= _assistant_members(message)
    elif role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        rendered["tools"] = message.get("tools")
    rendered |= {
        name: value for name in ("name", "task") if isinstance(value := message.get(name), str)
    }
    return rendered


def _assistant_members(message: Mapping[str, Any]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ValueError("tool_calls is not a list")
        members["tool_calls"] = [_tool_call(call) for call in calls]
    if (reasoning := message.get("reasoning")) is not None:
        # Some templates read it by its former name.
        members["reasoning"] = members["reasoning_content"] = reasoning
    return members


def _tool_call(call: object) -> dict[str, Any]:
    """The call with its arguments as an object, which templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ValueError("an entry of tool_calls has no function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            # In a conversation's history: vLLM goes on without them.
            return {}
    return arguments if isinstance(arguments, dict) else {}
