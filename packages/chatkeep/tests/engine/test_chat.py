"""What ``chat()`` takes and refuses before anything runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import ResumeEntry, Tool, UserMessage

from chatkeep.engine import ChatMiddleware, Event, ModelRequest, chat, model_finished
from chatkeep.errors import ChatkeepError, CompositionError
from chatkeep.testkit.played import PlayedModel, collect

pytestmark = pytest.mark.anyio


async def _end(request: ModelRequest) -> AsyncIterator[Event]:
    yield model_finished(request, "stop", usage={"promptTokens": 1, "cost": 2}, response_id="r-1")


class Streams:
    provider = "p"

    def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        return _end(request)


@pytest.mark.parametrize("given", [None, "gpt", PlayedModel, object(), Streams()])
def test_what_is_no_model_adapter_is_refused(given: Any) -> None:
    """Also the class instead of an object of it, and one that does not name its model."""
    with pytest.raises(
        CompositionError, match=r"not a model adapter.*give an object with provider"
    ):
        chat(adapter=given, messages=[])


def test_a_middleware_without_its_list_is_refused() -> None:
    one: Any = ChatMiddleware()
    with pytest.raises(CompositionError, match="middleware is a list"):
        chat(adapter=PlayedModel(), messages=[], middleware=one)


@pytest.mark.parametrize("limit", [0, -1, True])
def test_the_loop_needs_a_positive_number_of_calls(limit: int) -> None:
    with pytest.raises(ValueError, match="positive number"):
        chat(adapter=PlayedModel(), messages=[], loop=limit)


@pytest.mark.parametrize("row", [{"content": "no role"}, {"role": "user", "content": 3}])
def test_messages_that_are_none_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ChatkeepError):
        chat(adapter=PlayedModel(), messages=[row])


async def test_rows_may_be_agui_models_ui_messages_and_model_messages() -> None:
    model = PlayedModel(_end)
    rows: list[Any] = [
        UserMessage(id="u1", role="user", content="as a model"),
        {
            "id": "a1",
            "role": "assistant",
            "parts": [{"type": "text", "content": "as parts"}],
        },
        {"id": "u2", "role": "user", "content": [{"type": "text", "content": "as content parts"}]},
        {"id": "act", "role": "activity", "activityType": "search", "content": {"q": 1}},
    ]
    stream = chat(
        adapter=model,
        messages=rows,
        client_tools=[Tool(name="cli", description="d", parameters={"type": "object"})],
    )
    events = [e.model_dump(by_alias=True) for e in await collect(stream)]
    (request,) = model.requests
    assert [(m.get("id"), m.get("role")) for m in request.messages] == [
        ("u1", "user"),
        ("a1", "assistant"),
        ("u2", "user"),
    ]
    assert [t.name for t in request.tools] == ["cli"]
    tanstack = events[-1]["metadata"]["tanstack"]
    assert (tanstack["responseId"], tanstack["usage"]) == ("r-1", {"cost": 2})


async def test_answers_to_nothing_are_refused_on_the_wire() -> None:
    entry = ResumeEntry(interrupt_id="i", status="cancelled")
    stream = chat(adapter=PlayedModel(), messages=[], resume=[entry], parent_run_id="r0")
    events = [e.model_dump(by_alias=True) for e in await collect(stream)]
    assert [e["type"] for e in events] == ["RUN_STARTED", "RUN_ERROR"]
    errors = events[-1]["metadata"]["tanstack"]["interruptErrors"]
    codes = ["unknown-interrupt", "incomplete-batch", "item-validation-failed"]
    assert [e["code"] for e in errors] == codes
    assert {e["interruptedRunId"] for e in errors} == {"r0"}
    assert errors[1]["interruptIds"] == ["i"]
