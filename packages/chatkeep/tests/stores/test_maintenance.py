"""Maintenance: lost runs are ended once and whole, retention erases for good."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatkeep import (
    CompositionError,
    Persistence,
    RunConflict,
    RunError,
    RunPatch,
    Scope,
    compose_persistence,
    define_message_store,
    define_run_store,
    memory_persistence,
)
from chatkeep.stores import Splice, TurnCommit

pytestmark = pytest.mark.anyio

USER = {"id": "u", "role": "user", "content": "question"}
PARTIAL = {"id": "a", "role": "assistant", "content": "half an ans", "metadata": {"k": 1}}
STOPPED = {**PARTIAL, "metadata": {"k": 1, "tanstack": {"stopReason": "error"}}}


def own_messages() -> Any:
    kept: dict[str, list[Any]] = {}

    async def load_thread(thread_id: str) -> list[Any]:
        return list(kept.get(thread_id, []))

    async def save_thread(thread_id: str, messages: Any) -> None:
        kept[thread_id] = list(messages)

    return define_message_store(load_thread=load_thread, save_thread=save_thread)


@pytest.fixture(params=["one backend", "two backends", "own messages", "no messages"])
async def bag(request: Any, memory: Persistence, clock: Any) -> Persistence:
    messages = {
        "one backend": None,
        "two backends": memory_persistence(clock=clock).stores.messages,
        "own messages": own_messages(),
        "no messages": False,
    }[request.param]
    return compose_persistence(memory, overrides={"messages": messages})


async def start(bag: Persistence, run_id: str = "r", thread_id: str = "t", **fields: Any) -> None:
    if bag.stores.messages is not None:
        await bag.stores.messages.save_thread(thread_id, [USER])
    await bag.stores.runs.create_or_resume(
        run_id, thread_id, started_at=1, lease_token="mine", lease_ms=100, **fields
    )
    await bag.stores.runs.backend.save_draft(thread_id, run_id, [PARTIAL], lease_token="mine")


async def test_a_run_whose_lease_ran_out_fails_and_its_draft_becomes_a_message(
    bag: Persistence, clock: Any
) -> None:
    await start(bag)
    assert await bag.maintenance().sweep() == []
    clock.forward(100)
    [lost] = await bag.maintenance().sweep()
    run = await bag.stores.runs.get("r")
    assert lost.run == run
    assert (run.status, run.error.code, run.finished_at) == ("failed", "worker_lost", clock.now)
    assert lost.draft.messages == [PARTIAL]
    if bag.stores.messages is not None:
        assert await bag.stores.messages.load_thread("t") == [USER, STOPPED]
    assert (await bag.export_thread("t")).drafts == []
    assert await bag.maintenance().sweep() == []


async def test_what_was_streamed_stands_behind_its_own_question(
    bag: Persistence, clock: Any
) -> None:
    await start(bag, extra={"anchorId": "u"})
    messages = bag.stores.messages
    if messages is None:
        return
    later = [{"id": f"{role}2", "role": role, "content": "later"} for role in ("user", "assistant")]
    await messages.save_thread("t", [USER, *later])
    clock.forward(100)
    assert len(await bag.maintenance().sweep()) == 1
    assert await messages.load_thread("t") == [USER, STOPPED, *later]
    assert await bag.maintenance().sweep() == []


async def test_what_was_streamed_for_a_question_that_was_cut_goes_to_the_cut(
    memory: Persistence, clock: Any
) -> None:
    await start(memory, extra={"anchorId": "u"})
    other = {"id": "other", "role": "user", "content": "edited"}
    await memory.stores.messages.save_thread("t", [other])
    clock.forward(100)
    assert len(await memory.maintenance().sweep()) == 1
    assert await memory.stores.messages.load_thread("t") == [other]
    [cut] = await memory.stores.messages.list_cuts("t")
    assert await memory.stores.messages.load_cut("t", cut.cut_id) == [USER, STOPPED]


async def test_sweeps_at_once_end_a_run_once(bag: Persistence, clock: Any) -> None:
    await start(bag)
    clock.forward(100)
    results = await asyncio.gather(*(bag.maintenance().sweep() for _ in range(4)))
    assert sum(map(len, results)) == 1
    if bag.stores.messages is not None:
        assert await bag.stores.messages.load_thread("t") == [USER, STOPPED]


async def test_a_worker_that_was_only_late_may_still_complete(
    memory: Persistence, clock: Any
) -> None:
    await start(memory)
    clock.forward(100)
    await memory.maintenance().sweep()
    with pytest.raises(RunConflict):
        await memory.stores.runs.update("r", RunPatch(status="completed"))
    answer = {"id": "a", "role": "assistant", "content": "half an answer"}
    await memory.backends[0].commit_turn(
        TurnCommit(
            commit_id="late",
            thread_id="t",
            run_id="r",
            lease_token="mine",
            splice=Splice(keep_through=1, tail=[answer]),
            run=RunPatch(status="completed", finished_at=clock.now),
        )
    )
    run = await memory.stores.runs.get("r")
    assert (run.status, run.error) == ("completed", None)
    assert await memory.stores.messages.load_thread("t") == [USER, answer]
    assert await memory.stores.messages.list_cuts("t") == []


async def test_a_lost_regenerate_leaves_the_old_answer(memory: Persistence, clock: Any) -> None:
    await start(memory)
    await memory.stores.runs.update("r", RunPatch(hide_from=1))
    clock.forward(100)
    [lost] = await memory.maintenance().sweep()
    assert lost.run.status == "failed"
    assert await memory.stores.messages.load_thread("t") == [USER]
    assert (await memory.export_thread("t")).drafts == []


async def test_only_the_last_assistant_message_of_a_draft_was_cut_off(
    memory: Persistence, clock: Any
) -> None:
    await start(memory)
    call = {"id": "c", "role": "assistant", "content": None, "toolCalls": []}
    result = {"id": "x", "role": "tool", "content": "1", "toolCallId": "k"}
    backend = memory.backends[0]
    for draft, stored in (
        ([call, result, PARTIAL], [call, result, STOPPED]),
        ([call, result], [call, result]),
        ([], []),
    ):
        await memory.delete_thread("t")
        await start(memory)
        await backend.save_draft("t", "r", draft)
        clock.forward(100)
        await memory.maintenance().sweep()
        assert await memory.stores.messages.load_thread("t") == [USER, *stored]


async def test_runs_that_nobody_drives_are_left_alone(memory: Persistence, clock: Any) -> None:
    runs = memory.stores.runs
    await runs.create_or_resume("own", "t", started_at=1)
    await runs.create_or_resume("parked", "t", started_at=1, lease_token="x", lease_ms=1)
    await runs.update("parked", RunPatch(status="interrupted"))
    await runs.create_or_resume("renewed", "t", started_at=1, lease_token="x", lease_ms=1)
    clock.forward(100)
    await memory.backends[0].renew_lease("t", "renewed", "x", 1000)
    assert await memory.maintenance().sweep() == []


async def test_a_sweep_crosses_scopes_and_takes_the_longest_lost_first(
    memory: Persistence, clock: Any
) -> None:
    scopes = [Scope(), Scope(tenant_id="x"), Scope(tenant_id="x", user_id="u")]
    for scope in reversed(scopes):
        await start(memory.scoped(scope))
        clock.forward(1)
    clock.forward(100)
    maintenance = memory.scoped(scopes[1]).maintenance()
    first = await maintenance.sweep(limit=2)
    assert [row.scope for row in first] == [scopes[2], scopes[1]]
    assert [row.scope for row in await maintenance.sweep()] == [scopes[0]]
    for scope in scopes:
        view = memory.scoped(scope)
        assert await view.stores.messages.load_thread("t") == [USER, STOPPED]
        assert (await view.stores.runs.get("r")).error == RunError(
            message="The worker that ran it is gone.", code="worker_lost"
        )


async def test_a_sweep_that_broke_off_between_two_backends_appends_the_draft_once(
    memory: Persistence, clock: Any
) -> None:
    bag = compose_persistence(
        memory, overrides={"messages": memory_persistence(clock=clock).stores.messages}
    )
    await start(bag)
    clock.forward(100)
    runs = bag.stores.runs.backend
    works = runs._commit_turn

    async def broken(commit: TurnCommit) -> Any:
        raise OSError("gone")

    runs._commit_turn = broken
    with pytest.raises(OSError, match="gone"):
        await bag.maintenance().sweep()
    assert (await bag.stores.runs.get("r")).status == "running"
    runs._commit_turn = works
    assert len(await bag.maintenance().sweep()) == 1
    assert await bag.stores.messages.load_thread("t") == [USER, STOPPED]


async def nothing(*_: Any, **__: Any) -> Any:
    return None


async def test_runs_without_leases_cannot_be_swept(memory: Persistence) -> None:
    functions = dict.fromkeys(["create_or_resume", "update", "get", "find_active_run"], nothing)
    bag = compose_persistence(memory, overrides={"runs": define_run_store(**functions)})
    with pytest.raises(CompositionError, match="keeps no leases"):
        await bag.maintenance().sweep()
    without = compose_persistence(memory, overrides={"runs": False})
    assert await without.maintenance().sweep() == []
    assert await without.maintenance().list_reclaimable(ttl_ms=0) == []


async def test_reclaimable_runs_are_listed_over_all_scopes(memory: Persistence) -> None:
    for name, since in (("a", 30), ("b", 10), ("c", 41)):
        runs = memory.scoped(Scope(user_id=name)).stores.runs
        await runs.create_or_resume("r", "t", started_at=1)
        await runs.update("r", RunPatch(detached_since=since))
    found = await memory.maintenance().list_reclaimable(ttl_ms=60, now=100)
    assert [row.scope.user_id for row in found] == ["b", "a"]


# ----------------------------------------------------------------------------- retention


async def test_old_cuts_are_purged_in_every_scope(memory: Persistence, clock: Any) -> None:
    scope = Scope(tenant_id="x")
    views = {"t": memory, "subagent:t": memory.scoped(scope)}
    for name, view in views.items():
        await view.stores.messages.save_thread(name, [USER, PARTIAL])
        await view.stores.messages.save_thread(name, [USER])
        clock.forward(10)
    await memory.stores.messages.save_thread("t", [])
    maintenance = memory.maintenance()
    old = clock.now
    assert await maintenance.purge_cuts(before=old, limit=1) == [(Scope(), "t", 1)]
    assert await maintenance.purge_cuts(before=old) == [(scope, "subagent:t", 1)]
    assert await maintenance.purge_cuts(before=old) == []
    [left] = await memory.stores.messages.list_cuts("t")
    assert left.message_ids == ["u"]


async def test_idle_threads_are_purged_with_their_children(memory: Persistence, clock: Any) -> None:
    scope = Scope(user_id="u")
    view = memory.scoped(scope)
    await start(view)
    await view.stores.runs.create_or_resume("c", "subagent:c", started_at=1, parent_run_id="r")
    await memory.stores.messages.save_thread("t", [USER])
    clock.forward(1000)
    await memory.stores.messages.save_thread("fresh", [USER])
    purged = await memory.maintenance().purge_threads(idle_ms=1000)
    assert sorted(purged, key=repr) == sorted([(Scope(), "t"), (scope, "t")], key=repr)
    assert await view.stores.runs.get("c") is None
    listed = [info.thread_id for info in (await memory.list_threads()).threads]
    assert listed == ["fresh"]
    assert await memory.maintenance().purge_threads(idle_ms=1000) == []


async def test_a_thread_stays_while_a_leased_run_lives_in_it(
    memory: Persistence, clock: Any
) -> None:
    await start(memory)
    clock.forward(99)
    assert await memory.maintenance().purge_threads(idle_ms=50) == []
    clock.forward(1)
    assert await memory.maintenance().purge_threads(idle_ms=50) == [(Scope(), "t")]


async def test_a_thread_stays_while_another_backend_of_the_bag_is_in_use(
    memory: Persistence, clock: Any
) -> None:
    other = memory_persistence(clock=clock)
    bag = compose_persistence(memory, overrides={"interrupts": other.stores.interrupts})
    await bag.stores.messages.save_thread("t", [USER])
    clock.forward(100)
    await other.stores.activities.save_activities("t", [])
    assert await bag.maintenance().purge_threads(idle_ms=50) == []
    clock.forward(100)
    assert await bag.maintenance().purge_threads(idle_ms=50) == [(Scope(), "t")]
    assert not await bag.delete_thread("t")
