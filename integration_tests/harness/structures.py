"""What structured answers are asked for, and whether a text is one: plain data, no engine."""

from __future__ import annotations

import json
import re
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "kind": {"enum": ["in", "on", "other"]}},
    "required": ["ab", "kind"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{3}-(12|34)[0-9]{2}(the|then|thence)"
GRAMMAR = """
root ::= "call " name "(" args ")"
name ::= "tree" | "on" | "sand"
args ::= number ("," number){0,2}
number ::= [1-9] [0-9]{0,2}
"""
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "in", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "on",
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": [1, 2, 12]}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    },
]
# The server holds arguments to their schema where a tool says so, and the form of a call always.
STRICT_TOOLS = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED = {"type": "function", "function": {"name": "on"}}
CHOICE = ["the end", "the start", "zq", "never"]
CALL = re.compile(r"call (tree|on|sand)\([1-9][0-9]{0,2}(,[1-9][0-9]{0,2}){0,2}\)")


def follows_schema(text: str) -> bool:
    """Whether the text is JSON that the schema allows."""
    value = json.loads(text)
    return (
        list(value) == ["ab", "kind"]
        and isinstance(value["ab"], bool)
        and value["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
    )


def are_arguments(text: str) -> bool:
    """Whether the text is what the tool `on` may be called with."""
    value = json.loads(text)
    return list(value) == ["at"] and value["at"] in (1, 2, 12)


# Of each tool: whether a text is what it may be called with.
ARGUMENTS_OF = {"in": follows_schema, "on": are_arguments}


def are_calls(text: str) -> bool:
    """Whether the text is calls of the tools, at least one, with their arguments."""
    calls = json.loads(text)
    return bool(calls) and all(
        list(call) == ["name", "parameters"]
        and ARGUMENTS_OF[call["name"]](json.dumps(call["parameters"]))
        for call in calls
    )
