"""What one turn writes, and what it leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from ag_ui.core import (
    BaseEvent,
    EventType,
    RunErrorEvent,
    RunFinishedEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallStartEvent,
)

from chatkeep.engine import ChatMiddleware
from chatkeep.engine.adapter import ModelRequest, model_finished
from chatkeep.engine.middleware import ChatConfig, ChatContext
from chatkeep.stores import TurnCommit

pytestmark = pytest.mark.anyio


async def test_a_plain_turn_is_one_read_and_two_commits(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"))
    assert lab.faults.log == ["read_view", "commit_turn", "commit_turn"]
    lab.faults.log.clear()
    await lab.turn(kit.user("u2", "SCENARIO:server-tool"))
    assert lab.faults.log == ["read_view", "commit_turn", "commit_turn"]


async def test_a_turn_writes_its_new_messages_only(lab: Any, kit: Any) -> None:
    await lab.fill(*(kit.user(f"old{i}", "x" * 100) for i in range(300)))
    (backend,) = lab.persistence.backends
    commits: list[TurnCommit] = []
    real = backend._commit_turn

    async def spy(commit: TurnCommit) -> Any:
        commits.append(commit)
        return await real(commit)

    backend._commit_turn = spy
    await lab.turn(kit.user("u1"))
    start, finish = commits
    assert start.splice is not None
    assert finish.splice is not None
    assert [m.get("id") for m in start.splice.tail] == ["u1"]
    assert [m.get("role") for m in finish.splice.tail] == ["assistant"]
    assert len(await lab.stored()) == 302


async def test_the_question_and_the_run_are_stored_before_the_model_is_called(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    assert await lab.said() == ["user: hello"]
    run = await lab.run("r1")
    assert run.status == "running"
    assert run.lease is not None
    model.go.set()
    await task


async def test_the_terminal_event_follows_the_commit_and_says_what_was_seen(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced(waits=False)
    lab.faults.stall("commit_turn", seconds=0.05, times=5)
    events = await lab.turn(kit.user("u1"), adapter=model)
    end = kit.terminal(events)
    assert isinstance(end, RunFinishedEvent)
    assert end.metadata is not None
    assert end.metadata["chatkeep"] == {"seen": 2}
    assert await lab.said() == ["user: hello", "assistant: one two"]
    run = await lab.run("r1")
    assert run.status == "completed"
    assert run.finished_at >= run.started_at


async def test_the_stored_answer_has_the_streamed_id_and_the_tag_of_its_run(
    lab: Any, kit: Any
) -> None:
    events = await lab.turn(kit.user("u1"))
    streamed = next(e.message_id for e in events if e.type is EventType.TEXT_MESSAGE_START)
    _, answer = await lab.stored()
    assert answer["id"] == streamed
    assert answer["metadata"]["tanstack"]["run"] == {"id": "r1"}


async def test_ids_times_and_tags_stay_over_later_turns(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"))
    first = await lab.stored()
    for number in range(2, 5):
        shown = [{k: m[k] for k in ("id", "role", "content")} for m in await lab.stored()]
        await lab.turn(*shown, kit.user(f"u{number}"))
    now = await lab.stored()
    assert now[:2] == first
    assert len(now) == 8
    assert {m["metadata"]["tanstack"]["run"]["id"] for m in now if m["role"] == "assistant"} == {
        "r1",
        "r2",
        "r3",
        "r4",
    }


async def test_a_message_without_an_id_gets_a_durable_one(lab: Any, kit: Any) -> None:
    await lab.turn({"role": "user", "content": "no id"})
    first, _ = await lab.stored()
    assert first["id"].startswith("msg-")
    assert (await lab.stored())[0]["id"] == first["id"]


async def test_usage_is_the_sum_over_all_model_calls(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1", "SCENARIO:server-tool"))
    assert (await lab.run("r1")).usage == {
        "promptTokens": 20,
        "completionTokens": 10,
        "totalTokens": 30,
    }


async def test_a_provider_that_reports_no_usage_leaves_none(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"), adapter=kit.Paced(waits=False))
    assert "usage" not in (await lab.run("r1")).to_json()


async def test_an_empty_post_continues_the_stored_thread(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"))
    await lab.turn()
    assert [m["role"] for m in await lab.stored()] == ["user", "assistant"]


async def test_posting_only_the_newest_message_keeps_all_the_others(lab: Any, kit: Any) -> None:
    await lab.fill(*(kit.user(f"m{i}") for i in range(40)))
    await lab.turn(kit.user("new"))
    assert len(await lab.stored()) == 42


async def test_the_same_history_posted_again_and_again_does_not_grow(lab: Any, kit: Any) -> None:
    for number in range(3):
        shown = [dict(m) for m in await lab.stored()]
        await lab.turn(*shown, kit.user(f"u{number}"))
    assert len(await lab.stored()) == 6


# ------------------------------------------------------------------- regenerate, edit


async def answered(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1", "old"))


async def test_a_regenerate_replaces_the_answer_when_it_is_done_and_archives_the_old_one(
    lab: Any, kit: Any
) -> None:
    await answered(lab, kit)
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.began.wait()
    assert await lab.ids() == ["u1", "a1"]
    model.go.set()
    await task
    assert await lab.said() == ["user: hello", "assistant: one two"]
    (cut,) = await lab.persistence.stores.messages.list_cuts("t1")
    assert cut.message_ids == ["a1"]
    assert lab.faults.calls["commit_turn"] == 3  # the fill, then two


async def test_a_regenerate_that_fails_leaves_the_old_answer(lab: Any, kit: Any) -> None:
    await answered(lab, kit)
    model = kit.Paced(waits=False, error=RuntimeError("provider down"))
    events = await lab.turn(kit.user("u1"), adapter=model)
    assert isinstance(kit.terminal(events), RunErrorEvent)
    assert await lab.ids() == ["u1", "a1"]
    assert (await lab.run("r1")).status == "failed"


async def test_a_regenerate_that_is_stopped_leaves_the_old_answer(lab: Any, kit: Any) -> None:
    await answered(lab, kit)
    model = kit.Paced()
    task = lab.start(
        kit.user("u1"), adapter=model, middleware=lab.middleware(snapshot_streaming=True)
    )
    await model.said.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await lab.ids() == ["u1", "a1"]
    assert (await lab.run("r1")).status == "aborted"


async def test_an_edit_cuts_at_its_start_and_archives(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"), kit.user("u2"), kit.assistant("a2"))
    model = kit.Paced()
    task = lab.start(kit.user("u1"), kit.assistant("a1"), kit.user("u2b"), adapter=model)
    await model.began.wait()
    assert await lab.ids() == ["u1", "a1", "u2b"]
    model.go.set()
    await task
    assert (await lab.ids())[:3] == ["u1", "a1", "u2b"]
    (cut,) = await lab.persistence.stores.messages.list_cuts("t1")
    assert cut.message_ids == ["u2", "a2"]


async def test_what_a_client_cannot_send_survives_its_post(lab: Any, kit: Any) -> None:
    rich = {
        **kit.assistant("a1", "text"),
        "thinking": [{"content": "hm", "signature": "s"}],
        "metadata": {"tanstack": {"responseId": "x"}},
    }
    await lab.fill(kit.user("u1"), rich)
    await lab.turn(kit.user("u1"), kit.assistant("a1", "text"), kit.user("u2"))
    assert (await lab.stored())[1] == rich


# ------------------------------------------------------------------------------- gate


async def test_a_stale_tab_that_says_what_it_saw_cuts_nothing_it_did_not_see(
    lab: Any, kit: Any
) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"))
    await lab.turn(kit.user("u2"), seen=2)
    await asyncio.sleep(0.005)  # a turn of this very millisecond counts as under way
    before = await lab.stored()
    events = await lab.turn(kit.user("u1"), kit.assistant("a1"), kit.user("u3"), seen=2)
    end = kit.terminal(events)
    assert isinstance(end, RunErrorEvent)
    assert end.code == "unseen-messages"
    assert await lab.stored() == before
    assert await lab.run("r2") is None


async def test_a_tab_that_saw_everything_may_cut(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1"), kit.assistant("a1"))
    events = await lab.turn(kit.user("u2"), seen=2)
    seen = kit.terminal(events).metadata["chatkeep"]["seen"]
    events = await lab.turn(kit.user("u1"), kit.assistant("a1"), kit.user("u3"), seen=seen)
    assert isinstance(kit.terminal(events), RunFinishedEvent)
    assert (await lab.ids())[2] == "u3"


async def test_a_repeated_post_never_starts_the_model_again(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model, run_id="r1")
    await model.began.wait()
    events = await lab.turn(kit.user("u1"), adapter=model, run_id="r1")
    assert kit.terminal(events).code == "run-conflict"
    model.go.set()
    await task
    events = await lab.turn(kit.user("u1"), adapter=model, run_id="r1")
    assert kit.terminal(events).code == "run-conflict"
    assert len(model.requests) == 1
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert (await lab.run("r1")).status == "completed"


async def test_two_posts_of_one_run_at_once_drive_it_once(lab: Any, kit: Any) -> None:
    model = kit.Paced(waits=False)
    both = await asyncio.gather(
        *(lab.turn(kit.user("u1"), adapter=model, run_id="r1") for _ in range(2))
    )
    kinds = sorted(kit.terminal(events).type.value for events in both)
    assert kinds == ["RUN_ERROR", "RUN_FINISHED"]
    assert len(model.requests) == 1
    assert await lab.said() == ["user: hello", "assistant: one two"]


async def test_a_run_id_of_another_thread_is_refused_and_stays_as_it_is(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1"), run_id="r1")
    before = await lab.run("r1")
    events = await lab.turn(kit.user("x1"), run_id="r1", thread_id="t2")
    assert kit.terminal(events).code == "run-conflict"
    assert await lab.run("r1") == before
    assert await lab.persistence.stores.messages.load_thread("t2") == []


async def test_a_crashed_run_may_be_taken_over_when_its_lease_is_over(kit: Any) -> None:
    from chatkeep.memory import memory_persistence

    now = 1_000_000
    lab = kit.Lab(memory_persistence(clock=lambda: now))
    dead, model = kit.Paced(), kit.Paced(waits=False)
    dead_task = lab.start(kit.user("u1"), adapter=dead, run_id="r1")
    await dead.said.wait()
    now += 30_001
    await lab.turn(kit.user("u1"), adapter=model, run_id="r1")
    dead.go.set()
    events = await dead_task
    assert kit.terminal(events).code == "run-conflict"
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert (await lab.run("r1")).status == "completed"


async def test_a_question_that_waits_refuses_a_plain_post_and_nothing_is_written(
    lab: Any, kit: Any
) -> None:
    from chatkeep.records import InterruptRecord

    await lab.turn(kit.user("u1"))
    record = InterruptRecord(
        interrupt_id="i1", run_id="r0", thread_id="t1", requested_at=1, payload={"x": 1}
    )
    await lab.persistence.stores.interrupts.create(record)
    before = await lab.stored()
    events = await lab.turn(kit.user("u2"), run_id="r9")
    end = kit.terminal(events)
    assert end.code == "unknown-interrupt"
    item, batch = end.metadata["tanstack"]["interruptErrors"]
    assert (item["interruptId"], item["interruptedRunId"]) == ("i1", "r0")
    assert (batch["code"], batch["interruptIds"]) == ("incomplete-batch", [])
    assert await lab.stored() == before
    assert await lab.run("r9") is None


async def test_an_interrupt_of_somebody_else_does_not_gate(lab: Any, kit: Any) -> None:
    from chatkeep.records import InterruptRecord

    payload = {"id": "i1", "reason": "other", "message": "not ours"}
    record = InterruptRecord(
        interrupt_id="i1", run_id="r0", thread_id="t1", requested_at=1, payload=payload
    )
    await lab.persistence.stores.interrupts.create(record)
    assert isinstance(kit.terminal(await lab.turn(kit.user("u1"))), RunFinishedEvent)


async def test_an_answer_when_nothing_waits_is_refused(lab: Any, kit: Any) -> None:
    events = await lab.turn(
        kit.user("u1"),
        resume=[{"interruptId": "i1", "status": "resolved", "payload": 1}],
        parent_run_id="r0",
    )
    end = kit.terminal(events)
    assert end.code == "unknown-interrupt"
    item, batch = end.metadata["tanstack"]["interruptErrors"]
    assert item["interruptedRunId"] == batch["interruptedRunId"] == "r0"
    assert batch["interruptIds"] == ["i1"]
    assert await lab.stored() == []


# ------------------------------------------------------------------------ bad endings


async def test_a_failed_run_keeps_the_question_and_says_why(lab: Any, kit: Any) -> None:
    await lab.turn(kit.user("u1", "SCENARIO:error"))
    assert await lab.ids() == ["u1"]
    run = await lab.run("r1")
    assert run.status == "failed"
    assert run.error.message == "scripted failure"
    assert run.finished_at is not None


async def test_usage_is_kept_when_a_later_call_fails(lab: Any, kit: Any) -> None:
    class Breaks(ChatMiddleware):
        async def on_tool_phase_complete(self, ctx: ChatContext, info: Any) -> None:
            raise RuntimeError("after the tools")

    await lab.turn(kit.user("u1", "SCENARIO:server-tool"), middleware=[lab.middleware(), Breaks()])
    run = await lab.run("r1")
    assert run.status == "failed"
    assert run.usage == {"promptTokens": 10, "completionTokens": 5, "totalTokens": 15}


async def test_a_stopped_run_is_aborted_with_a_finish_time(lab: Any, kit: Any) -> None:
    model = kit.Paced()
    task = lab.start(kit.user("u1"), adapter=model)
    await model.said.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run = await lab.run("r1")
    assert (run.status, run.error) == ("aborted", None)
    assert run.finished_at is not None
    assert await lab.ids() == ["u1"]


async def test_a_value_that_cannot_be_stored_fails_before_the_model_is_called(
    lab: Any, kit: Any
) -> None:
    model = kit.Paced(waits=False)
    bad = {**kit.user("u1"), "metadata": {"n": float("nan")}}
    events = await lab.turn(bad, adapter=model)
    assert kit.terminal(events).code == "invalid-value"
    assert model.requests == []
    assert await lab.stored() == []
    assert await lab.run("r1") is None


async def test_the_messages_of_the_run_are_never_changed_in_place(lab: Any, kit: Any) -> None:
    seen: list[Any] = []

    class Watch(ChatMiddleware):
        async def on_finish(self, ctx: ChatContext, info: Any) -> None:
            seen.extend(ctx.messages)

    await lab.turn(kit.user("u1"), middleware=[lab.middleware(), Watch()])
    assert "run" not in seen[-1]["metadata"]["tanstack"]


async def test_a_middleware_that_rewrites_an_old_row_is_stored_in_place(lab: Any, kit: Any) -> None:
    await lab.fill(kit.user("u1", "secret"), kit.assistant("a1"))

    class Redact(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: Any) -> Any:
            if ctx.phase != "init":
                return None
            rows = [
                {**m, "content": "***"} if m.get("content") == "secret" else m
                for m in config.messages
            ]
            return {"messages": rows}

    await lab.turn(kit.user("u2"), middleware=[lab.middleware(), Redact()])
    assert (await lab.said())[0] == "user: ***"
    assert (await lab.ids())[:3] == ["u1", "a1", "u2"]
    assert await lab.persistence.stores.messages.list_cuts("t1") == []


async def test_a_row_that_a_middleware_adds_to_the_start_is_no_output(lab: Any, kit: Any) -> None:
    await answered(lab, kit)

    class Adds(ChatMiddleware):
        async def on_config(self, ctx: ChatContext, config: Any) -> Any:
            if ctx.phase != "init":
                return None
            return {"messages": [*config.messages, kit.user("note", "be kind")]}

    model = kit.Paced(waits=False, error=RuntimeError("provider down"))
    await lab.turn(kit.user("u1"), adapter=model, middleware=[lab.middleware(), Adds()])
    assert await lab.ids() == ["u1", "a1"]


class KeepsTheEnd(ChatMiddleware):
    """Exchanges the transcript for its last message, before each model call."""

    name = "keeps-the-end"

    async def on_config(self, ctx: ChatContext, config: ChatConfig) -> Mapping[str, Any] | None:
        return {"messages": config.messages[-1:]} if ctx.phase == "beforeModel" else None


@pytest.mark.parametrize("regenerates", [True, False])
async def test_the_answer_is_stored_when_a_middleware_shortens_the_transcript(
    lab: Any, kit: Any, regenerates: bool
) -> None:
    """Once and with its run's tag, however few messages are left of those it started from."""
    history = [kit.user("u1"), kit.assistant("a1"), kit.user("u2"), kit.assistant("a2")]
    await lab.fill(*history)
    posted = history[:3] if regenerates else [*history, kit.user("u3")]
    await lab.turn(*posted, middleware=[lab.middleware(), KeepsTheEnd()])
    question, answer = await lab.stored()
    assert question["id"] == ("u2" if regenerates else "u3")
    assert answer["role"] == "assistant"
    assert answer["metadata"]["tanstack"]["run"] == {"id": "r1"}
    [cut] = await lab.persistence.stores.messages.list_cuts("t1")
    assert set(cut.message_ids) == {m["id"] for m in history} - {question["id"]}


async def test_a_shortened_transcript_keeps_finished_turns_of_a_failed_run_once(
    lab: Any, kit: Any
) -> None:
    class CallsThenFails:
        provider = model = "calls-then-fails"
        calls = 0

        async def stream(self, request: ModelRequest) -> AsyncIterator[BaseEvent]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("boom")
            yield ToolCallStartEvent(tool_call_id="c1", tool_call_name="get_weather")
            yield ToolCallArgsEvent(tool_call_id="c1", delta='{"city":"Paris"}')
            yield ToolCallEndEvent(tool_call_id="c1")
            yield model_finished(request, "tool_calls")

    await lab.fill(kit.user("u1"), kit.assistant("a1"))
    keep = [lab.middleware(), KeepsTheEnd()]
    events = await lab.turn(kit.user("u2"), adapter=CallsThenFails(), middleware=keep)
    assert kit.terminal(events).message == "boom"
    ids = await lab.ids()
    assert len(ids) == len(set(ids))


async def test_what_a_middleware_asks_a_model_on_the_side_is_no_part_of_the_turn(
    lab: Any, kit: Any
) -> None:
    """Not stored, not drafted, not shown by a reload; its usage is its own."""
    from chatkeep.engine import chat
    from chatkeep.persistence import hydrate_thread

    class Routes(ChatMiddleware):
        async def on_iteration(self, ctx: ChatContext, iteration: int, message_id: str) -> None:
            helper = kit.Paced(before=("route: ",), after=("A",), waits=False, usage=USED)
            events = [e async for e in chat(adapter=helper, messages=ctx.messages)]
            ctx.emit_custom_event("routed", {"events": len(events)})

    model = kit.Paced(usage=USED)
    keep = lab.middleware(snapshot_streaming=True, snapshot_interval_ms=0)
    task = lab.start(kit.user("u1"), adapter=model, middleware=[keep, Routes()])
    await model.said.wait()
    shown = await hydrate_thread(lab.persistence, "t1")
    model.go.set()
    events = await task
    assert "route:" not in f"{shown} {await lab.persistence.export_thread('t1')}"
    assert await lab.said() == ["user: hello", "assistant: one two"]
    assert (await lab.run("r1")).usage == USED
    assert [e.name for e in events if e.type is EventType.CUSTOM] == ["routed"]


async def test_reasoning_is_stored_once_with_its_signature_and_shown_by_a_reload(
    lab: Any, kit: Any
) -> None:
    from chatkeep.persistence import hydrate_thread

    await lab.turn(kit.user("u1", "SCENARIO:reasoning"))
    _, answer = await lab.stored()
    (thought,) = answer["thinking"]
    body = await hydrate_thread(lab.persistence, "t1")
    parts = [p for p in body["messages"][1]["parts"] if p["type"] == "thinking"]
    assert [p["content"] for p in parts] == [thought["content"]]
    shown = [{k: m[k] for k in ("id", "role", "content")} for m in await lab.stored()]
    await lab.turn(*shown, kit.user("u2"))
    assert (await lab.stored())[1] == answer


USED = {"promptTokens": 3, "completionTokens": 4, "totalTokens": 7}
