"""Token usage: how calls add up, and both ways between upstream's form and the wire's."""

from __future__ import annotations

from typing import Any

import pytest
from ag_ui.core import RunFinishedEvent, TokenUsage

from chatkeep.engine import add_usage
from chatkeep.engine.usage import leftovers, usage_of_event, usage_to_wire


@pytest.mark.parametrize(
    ("total", "more", "result"),
    [
        (None, {"promptTokens": 1}, {"promptTokens": 1}),
        ({"promptTokens": 1}, {"promptTokens": 2}, {"promptTokens": 3}),
        ({"promptTokens": 1}, {"completionTokens": 2}, {"promptTokens": 1, "completionTokens": 2}),
        ({"cost": 0.5}, {"cost": 0.25}, {"cost": 0.75}),
        (
            {"promptTokensDetails": {"cachedTokens": 1, "a": 1, "s": "x"}},
            {"promptTokensDetails": {"cachedTokens": 2, "b": 3, "s": "y"}},
            {"promptTokensDetails": {"cachedTokens": 3, "a": 1, "b": 3}},
        ),
        (
            {"costDetails": {"in": 1}},
            {"completionTokensDetails": {"reasoningTokens": 4}},
            {"costDetails": {"in": 1}, "completionTokensDetails": {"reasoningTokens": 4}},
        ),
        (
            {"billed": {"unit": "chars", "quantity": 3}},
            {"billed": {"unit": "chars", "quantity": 4}},
            {"billed": {"unit": "chars", "quantity": 7}},
        ),
        (
            {"billed": {"unit": "chars", "quantity": 3}},
            {"billed": {"unit": "pages", "quantity": 1}},
            {"billed": {"unit": "pages", "quantity": 1}},
        ),
        (
            {"providerUsageDetails": {"a": 1}, "x": 1},
            {"providerUsageDetails": {"b": 2}, "x": 2},
            {"providerUsageDetails": {"b": 2}, "x": 2},
        ),
        (
            {"unitsBilled": 2, "durationSeconds": 1.5},
            {"unitsBilled": 3},
            {"unitsBilled": 5, "durationSeconds": 1.5},
        ),
    ],
)
def test_calls_add_up(total: Any, more: Any, result: Any) -> None:
    before = dict(total or {}), dict(more)
    assert add_usage(total, more) == result
    assert (dict(total or {}), dict(more)) == before


FULL = {
    "promptTokens": 10,
    "completionTokens": 5,
    "totalTokens": 15,
    "promptTokensDetails": {"cachedTokens": 4, "cacheWriteTokens": 1, "audioTokens": 2},
    "completionTokensDetails": {"reasoningTokens": 3},
    "cost": 0.1,
}


def test_the_wire_has_an_entry_and_the_bag_the_rest() -> None:
    entry = usage_to_wire(FULL, provider="p", model="m")
    assert entry.model_dump(by_alias=True) == {
        "provider": "p",
        "model": "m",
        "inputTokens": 10,
        "outputTokens": 5,
        "totalTokens": 15,
        "cachedInputTokens": 4,
        "cacheWriteInputTokens": 1,
        "reasoningTokens": 3,
    }
    assert leftovers(FULL) == {"promptTokensDetails": {"audioTokens": 2}, "cost": 0.1}


def test_entry_and_bag_give_the_whole_back() -> None:
    event = RunFinishedEvent(
        thread_id="t",
        run_id="r",
        usage=[usage_to_wire(FULL)],
        metadata={"tanstack": {"usage": leftovers(FULL)}},
    )
    assert usage_of_event(event) == FULL


def test_several_entries_are_summed_and_none_is_none() -> None:
    two = [TokenUsage(input_tokens=1), TokenUsage(input_tokens=2, output_tokens=1)]
    assert usage_of_event(RunFinishedEvent(thread_id="t", run_id="r", usage=two)) == {
        "promptTokens": 3,
        "completionTokens": 1,
    }
    assert usage_of_event(RunFinishedEvent(thread_id="t", run_id="r")) is None


@pytest.mark.parametrize("value", [-1, 2**60, float("nan"), "7", None, True])
def test_counts_that_the_wire_cannot_carry_are_left_out(value: Any) -> None:
    assert usage_to_wire({"promptTokens": value}).input_tokens is None
