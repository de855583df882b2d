"""Token usage: the form hooks see, the form on the wire, and how calls add up.

Hooks and run records use upstream's object (``promptTokens``, ``completionTokens``,
``totalTokens``, details, costs). Events carry AG-UI's ``usage[]``, one entry per model call;
what has no place in an entry stays in ``metadata.tanstack.usage``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ag_ui.core import RunErrorEvent, RunFinishedEvent, TokenUsage

from chatkeep.engine.middleware import Usage

__all__ = ["add_usage", "leftovers", "usage_of_event", "usage_to_wire"]

_SUMMED = (
    "promptTokens", "completionTokens", "totalTokens", "cost", "durationSeconds", "unitsBilled",
)  # fmt: skip
_DETAILS = ("promptTokensDetails", "completionTokensDetails", "costDetails")
_WIRE_TOTALS = {
    "promptTokens": "input_tokens",
    "completionTokens": "output_tokens",
    "totalTokens": "total_tokens",
}
_WIRE_DETAILS = {
    ("promptTokensDetails", "cachedTokens"): "cached_input_tokens",
    ("promptTokensDetails", "cacheWriteTokens"): "cache_write_input_tokens",
    ("completionTokensDetails", "reasoningTokens"): "reasoning_tokens",
}


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mapping(value: object) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}


def add_usage(total: Usage | None, more: Usage) -> Usage:
    """``total`` plus one more call; neither argument is changed.

    Token counts, costs, seconds and units are summed, details per key (numbers only; a key
    that one side lacks is kept). ``billed`` is summed when the units are equal, otherwise the
    later one stays. Every other field: the later one stays.
    """
    if total is None:
        return dict(more)
    out: Usage = {**total, **more}
    for key in _SUMMED:
        a, b = _number(total.get(key)), _number(more.get(key))
        if a is not None and b is not None:
            out[key] = a + b
        elif a is not None and key not in more:
            out[key] = a
    for key in _DETAILS:
        left, right = _mapping(total.get(key)), _mapping(more.get(key))
        if left and right:
            out[key] = _sum_details(left, right)
    old, new = _mapping(total.get("billed")), _mapping(more.get("billed"))
    if old and new and old.get("unit") == new.get("unit"):
        a, b = _number(old.get("quantity")), _number(new.get("quantity"))
        if a is not None and b is not None:
            out["billed"] = {**new, "quantity": a + b}
    return out


def _sum_details(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in left.items() if _number(value) is not None}
    for key, value in right.items():
        number = _number(value)
        if number is not None:
            out[key] = out.get(key, 0) + number
    return out


def usage_of_event(event: RunFinishedEvent | RunErrorEvent) -> Usage | None:
    """The usage that a model call reported on its terminal event; None: it did not say.

    Entries of ``usage[]`` are summed; ``metadata.tanstack.usage`` adds what has no place there.
    """
    total: Usage | None = None
    for entry in event.usage or ():
        total = add_usage(total, _from_entry(entry))
    bag = _mapping((event.metadata or {}).get("tanstack"))
    extra = _mapping(bag.get("usage"))
    if extra:
        total = {**extra, **(total or {})}
        for key in _DETAILS:
            if key in extra:
                total[key] = {**_mapping(extra[key]), **_mapping(total.get(key))}
    return total


def _from_entry(entry: TokenUsage) -> Usage:
    out: Usage = {}
    for name, attribute in _WIRE_TOTALS.items():
        value = getattr(entry, attribute)
        if value is not None:
            out[name] = value
    for (group, name), attribute in _WIRE_DETAILS.items():
        value = getattr(entry, attribute)
        if value is not None:
            out.setdefault(group, {})[name] = value
    return out


def usage_to_wire(
    usage: Usage, *, provider: str | None = None, model: str | None = None
) -> TokenUsage:
    """One ``usage[]`` entry; counts that AG-UI cannot carry are left out."""
    values: dict[str, Any] = {}
    for name, attribute in _WIRE_TOTALS.items():
        values[attribute] = _count(usage.get(name))
    for (group, name), attribute in _WIRE_DETAILS.items():
        values[attribute] = _count(_mapping(usage.get(group)).get(name))
    return TokenUsage(provider=provider, model=model, **values)


def _count(value: object) -> int | None:
    number = _number(value)
    if number is None or number != number or not 0 <= number <= 2**53 - 1:
        return None
    return int(number)


def leftovers(usage: Usage) -> dict[str, Any]:
    """What of ``usage`` has no place in a ``usage[]`` entry; empty when all has."""
    out: dict[str, Any] = {}
    for key, value in usage.items():
        if key in _WIRE_TOTALS:
            continue
        if key in _DETAILS:
            rest = {n: v for n, v in _mapping(value).items() if (key, n) not in _WIRE_DETAILS}
            if rest:
                out[key] = rest
        elif value is not None:
            out[key] = value
    return out
