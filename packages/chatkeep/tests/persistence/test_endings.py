"""How runs end when models and tools do not do what they should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    RunErrorEvent,
    RunFinishedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

import chatkeep.persistence.committer as committer
from chatkeep.engine import chat, define_tool
from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.records import RunPatch

pytestmark = pytest.mark.anyio


class CallsThenWaits:
    """Says something, calls ``wait``, and answers when it has a result."""

    provider = model = "calls"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
        self.requests.append(request)
        identity = request.message_id
        yield TextMessageStartEvent(message_id=identity)
        yield TextMessageContentEvent(message_id=identity, delta="hold on")
        yield TextMessageEndEvent(message_id=identity)
        if len(self.requests) == 1:
            yield ToolCallStartEvent(
                tool_call_id="c1", tool_call_name="wait", parent_message_id=identity
            )
            yield ToolCallArgsEvent(tool_call_id="c1", delta="{}")
            yield ToolCallEndEvent(tool_call_id="c1")
        reason: Any = "tool_calls" if len(self.requests) == 1 else "stop"
        yield model_finished(request, reason, usage={"promptTokens": 10, "totalTokens": 15})


def waiting_tool(began: asyncio.Event) -> Any:
    async def wait(_: Any) -> Any:
        began.set()
        await asyncio.Event().wait()

    return define_tool(
        name="wait", description="waits", input_schema={"type": "object"}, execute=wait
    )


async def test_a_provider_that_reports_an_error_fails_the_run_with_its_code(
    lab: Any, kit: Any
) -> None:
    class Refuses:
        provider = model = "refuses"

        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            yield TextMessageStartEvent(message_id=request.message_id)
            yield TextMessageContentEvent(message_id=request.message_id, delta="a")
            yield RunErrorEvent(message="rate", code="429")

    await lab.turn(kit.user("u1"), adapter=Refuses())
    run = await lab.run("r1")
    assert (run.status, run.error.message, run.error.code) == ("failed", "rate", "429")
    assert run.finished_at is not None
    found = await lab.persistence.stores.runs.find_active_run("t1")
    assert found is None


class Panic(BaseException):
    """How extensions in Rust fail: no ``Exception``."""


async def test_a_model_that_panics_fails_the_run_and_its_lease_ends(lab: Any, kit: Any) -> None:
    """It comes out of the stream; the run is recorded as failed, and nobody renews its lease."""
    with pytest.raises(Panic):
        await lab.turn(kit.user("u1"), adapter=kit.Paced(waits=False, error=Panic("core")))
    run = await lab.run("r1")
    assert (run.status, run.error.message) == ("failed", "Panic: core")
    assert not [t for t in asyncio.all_tasks() if "lease" in t.get_name()]


async def test_a_long_error_text_is_kept(lab: Any, kit: Any) -> None:
    text = "\N{PILE OF POO}\"'" * 25_000
    await lab.turn(kit.user("u1"), adapter=kit.Paced(waits=False, error=RuntimeError(text)))
    run = await lab.run("r1")
    assert run.status == "failed"
    assert run.error.message.startswith(text[:1000])


@pytest.mark.parametrize("snapshots", [False, True])
async def test_a_run_that_is_stopped_in_a_tool_keeps_its_usage_and_the_thread_works_on(
    lab: Any, kit: Any, snapshots: bool
) -> None:
    began, model = asyncio.Event(), CallsThenWaits()
    stream = chat(
        adapter=model,
        messages=[kit.user("u1")],
        thread_id="t1",
        run_id="r1",
        tools=[waiting_tool(began)],
        middleware=[lab.middleware(snapshot_streaming=snapshots)],
    )

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await began.wait()
    stream.abort("stopped")
    await task
    run = await lab.run("r1")
    assert (run.status, run.usage) == ("aborted", {"promptTokens": 10, "totalTokens": 15})
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant", "tool"]
    assert rows[2]["error"]
    # Whatever was left, the next request to the model has a result for every call.
    after = kit.Paced(waits=False)
    assert isinstance(
        kit.terminal(await lab.turn(kit.user("u2"), adapter=after, run_id="r2")), RunFinishedEvent
    )
    sent = after.requests[0].messages
    calls = [c["id"] for m in sent for c in m.get("toolCalls") or ()]
    assert calls == [m["toolCallId"] for m in sent if m["role"] == "tool"]


async def test_a_turn_that_could_not_be_saved_can_be_asked_again(
    lab: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "OUTAGE_PAUSES", ())
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    lab.faults.refuse("commit_turn", times=4)
    model.go.set()
    assert isinstance(kit.terminal(await task), RunErrorEvent)
    # The browser shows the answer that it saw, and posts it with the next try.
    await lab.turn(kit.user("u1"), run_id="again")
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]


async def test_a_partial_answer_that_a_client_posts_stays_in_its_place(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1", "SCENARIO:error"))
    await lab.turn(kit.user("u1", "SCENARIO:error"), kit.assistant("p", "partial "), kit.user("u2"))
    assert (await lab.ids())[:3] == ["u1", "p", "u2"]
    assert len(await lab.stored()) == 4


async def test_a_kept_partial_answer_is_not_doubled_by_the_clients_copy(lab: Any, kit: Any) -> None:
    middleware = lab.middleware(snapshot_streaming=True)
    await lab.turn(kit.user("u1", "SCENARIO:error"), middleware=middleware)
    _, partial = await lab.stored()
    shown = kit.assistant(partial["id"], "partial ")
    await lab.turn(kit.user("u1", "SCENARIO:error"), shown, kit.user("u2"))
    rows = await lab.stored()
    assert [m["role"] for m in rows] == ["user", "assistant", "user", "assistant"]
    assert rows[1] == partial


async def test_an_edit_under_the_same_id_replaces_the_message_and_cuts_behind_it(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"), kit.user("u2", "old"), kit.assistant("a2"))
    await lab.turn(kit.user("u1"), kit.assistant("a1"), kit.user("u2", "new"))
    said = await lab.said()
    assert said[:3] == ["user: hello", "assistant: answer", "user: new"]
    assert len(said) == 4
    assert (await lab.ids())[2] == "u2"
    (cut,) = await lab.persistence.stores.messages.list_cuts("t1")
    assert cut.message_ids == ["a2"]


async def test_a_call_that_a_killed_process_left_open_does_not_block_the_thread(
    lab: Any, kit: Any
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    open_call = {"id": "a1", "role": "assistant", "content": None, "toolCalls": [call]}
    await lab.fill(kit.user("u1"), open_call)
    model = kit.Paced(waits=False)
    await lab.turn(kit.user("u2"), adapter=model)
    assert [m["role"] for m in model.requests[0].messages] == ["user", "assistant", "tool", "user"]
    assert (await lab.stored())[:2] == [kit.user("u1"), open_call]
    assert len(await lab.stored()) == 4


async def test_a_stream_that_just_ends_leaves_a_completed_run(lab: Any, kit: Any) -> None:
    class Breaks(kit.Paced):  # type: ignore[misc]
        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            yield TextMessageStartEvent(message_id=request.message_id)
            yield TextMessageContentEvent(message_id=request.message_id, delta="ok")

    assert isinstance(
        kit.terminal(await lab.turn(kit.user("u1"), adapter=Breaks())), RunFinishedEvent
    )
    assert (await lab.run("r1")).status == "completed"
    assert await lab.said() == ["user: hello", "assistant: ok"]


async def test_a_run_that_goes_on_under_its_own_id_adds_to_its_usage(lab: Any, kit: Any) -> None:
    runs = lab.persistence.stores.runs
    await runs.create_or_resume("r1", "t1", started_at=7, status="interrupted")
    await runs.update("r1", RunPatch(usage={"promptTokens": 10, "totalTokens": 15}))
    model = kit.Paced(waits=False, usage={"promptTokens": 7, "totalTokens": 10})
    await lab.turn(kit.user("u1"), adapter=model, run_id="r1")
    run = await lab.run("r1")
    assert (run.status, run.started_at) == ("completed", 7)
    assert run.usage == {"promptTokens": 17, "totalTokens": 25}


@pytest.mark.parametrize("odd", ["x" * 1025, "\U0001f600" * 300, "a\x00b", "a\ud800"])
@pytest.mark.parametrize("which", ["thread_id", "run_id"])
async def test_an_id_that_no_store_takes_ends_the_run_before_the_model(
    lab: Any, kit: Any, odd: str, which: str
) -> None:
    model = kit.Paced(waits=False)
    ids: Any = {"thread_id": "t1", "run_id": "r1", which: odd}
    stream = chat(adapter=model, messages=[kit.user("u1")], middleware=[lab.middleware()], **ids)
    end = kit.terminal([event async for event in stream])
    assert end.code == "invalid-value"
    assert model.requests == []
    assert (await lab.persistence.list_threads()).threads == []
