"""The conversations that are measured: about 1 KB a message, a third of them tool calls."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator

from chatkeep.records import ModelMessage

__all__ = ["answer", "history", "question", "size"]

_BODY = 900
"""Characters of text in a message; with its id, role and times that makes about 1 KB."""

_random = random.Random(20_261_130)


def _words(length: int) -> str:
    made = "".join(_random.choices(string.ascii_lowercase + " " * 5, k=length))
    return " ".join(made.split())


_POOL = _words(1 << 20)


def _text(length: int = _BODY) -> str:
    # A slice, since making up text must cost nothing beside storing it.
    at = _random.randrange(len(_POOL) - length)
    return _POOL[at : at + length]


def _id() -> str:
    return f"msg-{_random.getrandbits(64):016x}"


def question() -> ModelMessage:
    """A new user message."""
    return {
        "id": _id(),
        "role": "user",
        "content": _text(),
        "createdAt": "2026-11-30T12:00:00.000Z",
    }


def answer() -> list[ModelMessage]:
    """What a run adds: a tool call, its result, and the final text."""
    call = f"call_{_random.getrandbits(48):012x}"
    arguments = json.dumps({"query": _text(_BODY - 60), "limit": 10})
    return [
        {
            "id": _id(),
            "role": "assistant",
            "content": None,
            "toolCalls": [
                {
                    "id": call,
                    "type": "function",
                    "function": {"name": "search", "arguments": arguments},
                }
            ],
            "createdAt": "2026-11-30T12:00:01.000Z",
        },
        {
            "id": _id(),
            "role": "tool",
            "toolCallId": call,
            "content": json.dumps({"results": [_text(_BODY - 60)]}),
            "createdAt": "2026-11-30T12:00:02.000Z",
        },
        {
            "id": _id(),
            "role": "assistant",
            "content": _text(),
            "createdAt": "2026-11-30T12:00:03.000Z",
        },
    ]


def _endless() -> Iterator[ModelMessage]:
    while True:
        yield question()
        if _random.random() < 0.5:
            yield from answer()
        else:
            yield answer()[-1]


def history(count: int) -> list[ModelMessage]:
    """The first ``count`` messages of a conversation."""
    source = _endless()
    return [next(source) for _ in range(count)]


def size(messages: list[ModelMessage]) -> int:
    """Bytes of the messages as JSON."""
    return sum(len(json.dumps(m, separators=(",", ":")).encode()) for m in messages)
