"""Composing: replace, inherit, remove; a store is whole; what is missing is named."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from chatkeep import (
    ActivityRecord,
    CompositionError,
    Persistence,
    Scope,
    capabilities,
    compose_persistence,
    define_activity_store,
    define_interrupt_store,
    define_message_store,
    define_metadata_store,
    define_persistence,
    define_run_store,
    hydrate_thread,
    memory_persistence,
    require,
    with_persistence,
)
from chatkeep.stores import PagedMessages, RevisionedMessages

pytestmark = pytest.mark.anyio


async def nothing(*_: Any, **__: Any) -> Any:
    return []


async def test_each_store_is_replaced_inherited_or_removed(memory: Persistence) -> None:
    other = memory_persistence()
    mixed = compose_persistence(
        memory,
        overrides={"interrupts": other.stores.interrupts, "metadata": False, "runs": None},
    )
    assert mixed.stores.messages is memory.stores.messages
    assert mixed.stores.runs is memory.stores.runs
    assert mixed.stores.interrupts is other.stores.interrupts
    assert mixed.stores.metadata is None
    assert list(mixed.stores) == ["messages", "runs", "interrupts", "activities"]


async def test_neither_input_changes(memory: Persistence) -> None:
    overrides = {"metadata": False, "activities": None}
    before = memory.stores
    compose_persistence(memory, overrides=overrides)
    assert memory.stores is before
    assert before.metadata is not None
    assert overrides == {"metadata": False, "activities": None}


async def test_backends_are_merged_without_repeats_and_closed_together(
    memory: Persistence,
) -> None:
    other = memory_persistence()
    once = compose_persistence(
        memory, overrides={"runs": other.stores.runs, "interrupts": other.stores.interrupts}
    )
    mixed = compose_persistence(once, overrides={"metadata": memory.stores.metadata})
    assert mixed.backends == (*memory.backends, *other.backends)
    await mixed.aclose()
    await mixed.aclose()
    for closed in (memory, other):
        with pytest.raises(Exception, match="closed"):
            await closed.ping()


@pytest.mark.parametrize("key", ["locks", "Messages", "", "generationRuns"])
async def test_an_unknown_key_is_named_and_whether_it_is_a_store_or_an_override(
    memory: Persistence, key: str
) -> None:
    with pytest.raises(CompositionError, match=f"unknown override {key!r}"):
        compose_persistence(memory, overrides={key: False})
    with pytest.raises(CompositionError, match=f"unknown store {key!r}"):
        define_persistence({key: None})


async def test_true_is_no_override(memory: Persistence) -> None:
    with pytest.raises(CompositionError, match="True"):
        compose_persistence(memory, overrides={"runs": True})


@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("messages", "load_thread"),
        ("runs", "create_or_resume"),
        ("interrupts", "cancel"),
        ("activities", "load_activities"),
        ("metadata", "delete"),
    ],
)
async def test_a_missing_method_is_named(memory: Persistence, key: str, method: str) -> None:
    with pytest.raises(CompositionError, match=rf"the {key} store \(object\).* {method}\(\)"):
        compose_persistence(memory, overrides={key: object()})
    with pytest.raises(CompositionError, match="a store is whole"):
        define_persistence({key: memory})


async def test_two_functions_are_an_activity_store(memory: Persistence) -> None:
    kept: dict[str, Any] = {}

    async def load_activities(thread_id: str) -> list[ActivityRecord]:
        return kept.get(thread_id, [])

    async def save_activities(thread_id: str, activities: Any) -> None:
        kept[thread_id] = list(activities)

    store = define_activity_store(load_activities=load_activities, save_activities=save_activities)
    mixed = compose_persistence(memory, overrides={"activities": store})
    row = ActivityRecord(id="a", activity_type="x", content={}, index=0)
    await mixed.stores.activities.save_activities("t", [row])
    assert await mixed.stores.activities.load_activities("t") == [row]
    assert await memory.stores.activities.load_activities("t") == []
    assert mixed.backends == memory.backends


DEFINERS = [
    (define_message_store, ["load_thread", "save_thread"]),
    (define_run_store, ["create_or_resume", "update", "get", "find_active_run"]),
    (
        define_interrupt_store,
        [
            "create",
            "resolve",
            "cancel",
            "get",
            "list",
            "list_pending",
            "list_by_run",
            "list_pending_by_run",
        ],
    ),
    (define_activity_store, ["load_activities", "save_activities"]),
    (define_metadata_store, ["get", "set", "delete"]),
]


@pytest.mark.parametrize(("define", "methods"), DEFINERS, ids=lambda v: getattr(v, "__name__", ""))
async def test_a_definition_needs_every_function_and_names_the_missing_one(
    define: Any, methods: list[str]
) -> None:
    functions = dict.fromkeys(methods, nothing)
    store = define(**functions)
    assert await getattr(store, methods[0])("x") == []
    assert define.__name__ in repr(store)
    for missing in methods:
        partial = {k: v for k, v in functions.items() if k != missing}
        with pytest.raises(CompositionError, match=rf"{define.__name__}.* {missing}\(\)"):
            define(**partial)


async def test_an_object_is_checked_and_returned_as_it_is(memory: Persistence) -> None:
    assert define_message_store(memory.stores.messages) is memory.stores.messages
    with pytest.raises(CompositionError, match="load_thread"):
        define_message_store(object())  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="not both"):
        define_message_store(memory.stores.messages, load_thread=nothing)


async def test_a_tier_is_whole_or_absent() -> None:
    two = {"load_thread": nothing, "save_thread": nothing}
    plain = define_message_store(**two)
    assert not isinstance(plain, PagedMessages)
    paged = define_message_store(**two, load_page=nothing)
    assert isinstance(paged, PagedMessages)
    assert not isinstance(paged, RevisionedMessages)
    with pytest.raises(CompositionError, match=r"splice_thread\(\): RevisionedMessages is whole"):
        define_message_store(**two, load_transcript=nothing)
    with pytest.raises(CompositionError, match=r"no store has a method load_threads\(\)"):
        define_message_store(**two, load_threads=nothing)


class Sync:
    def load_thread(self, thread_id: str) -> list[Any]:
        return []

    async def save_thread(self, thread_id: str, messages: Any) -> None: ...


async def test_a_store_is_async_and_a_plain_method_is_refused(memory: Persistence) -> None:
    with pytest.raises(CompositionError, match=r"load_thread\(\).*Sync.*is not async"):
        compose_persistence(memory, overrides={"messages": Sync()})
    with pytest.raises(CompositionError, match=r"save_activities\(\).*is not async"):
        define_activity_store(load_activities=nothing, save_activities=lambda *_: None)  # type: ignore[arg-type,return-value]


class Lists:
    async def load_thread(self, thread_id: str) -> list[Any]:
        return []

    async def save_thread(self, thread_id: str, messages: Any) -> None: ...


async def test_a_class_in_place_of_a_store_is_refused(memory: Persistence) -> None:
    for compose in (
        lambda: compose_persistence(memory, overrides={"messages": Lists}),
        lambda: define_persistence({"messages": Lists}),
        lambda: define_message_store(Lists),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            CompositionError, match=r"messages store is the class Lists.*Lists\(…\)"
        ):
            compose()
    assert define_persistence({"messages": Lists()}).stores.messages is not None


class Forgetful(Lists):
    async def save_thread(self, messages: Any) -> None: ...  # type: ignore[override]


async def test_a_method_that_cannot_take_its_arguments_is_named(memory: Persistence) -> None:
    with pytest.raises(
        CompositionError, match=r"save_thread\(\) of the messages store \(Forgetful\) cannot"
    ):
        compose_persistence(memory, overrides={"messages": Forgetful()})

    async def no_thread() -> list[Any]:
        return []

    async def no_run(thread_id: str, interrupt_id: str) -> None: ...

    async def one_more(thread_id: str, activities: Any, revision: str) -> None: ...

    async def no_start(run_id: str, thread_id: str) -> Any: ...

    async def no_limit(thread_id: str) -> Any: ...

    with pytest.raises(CompositionError, match=r"load_thread\(\) of .*load_thread\(thread_id\)"):
        define_message_store(load_thread=no_thread, save_thread=nothing)
    with pytest.raises(CompositionError, match=r"save_activities\(\) of the activities store"):
        define_activity_store(load_activities=nothing, save_activities=one_more)
    interrupts = {**dict.fromkeys(dict(DEFINERS)[define_interrupt_store], nothing)}
    with pytest.raises(CompositionError, match=r"cancel\(thread_id, interrupt_id, run_id=…\)"):
        define_interrupt_store(**{**interrupts, "cancel": no_run})
    runs = dict.fromkeys(dict(DEFINERS)[define_run_store], nothing)
    with pytest.raises(CompositionError, match=r"create_or_resume\(\) of .*started_at"):
        define_run_store(**{**runs, "create_or_resume": no_start})
    with pytest.raises(CompositionError, match=r"load_page\(\) of .*limit"):
        define_message_store(load_thread=nothing, save_thread=nothing, load_page=no_limit)


async def test_a_run_store_without_leases_is_whole() -> None:
    async def create_or_resume(
        run_id: str, thread_id: str, *, started_at: int, parent_run_id: str | None = None
    ) -> Any: ...

    async def update(run_id: str, patch: Any, *, thread_id: str | None = None) -> None: ...

    async def get(run_id: str, *, thread_id: str | None = None) -> Any: ...

    async def find_active_run(thread_id: str) -> Any: ...

    define_run_store(
        create_or_resume=create_or_resume, update=update, get=get, find_active_run=find_active_run
    )


async def test_wrapped_and_partial_async_functions_are_async() -> None:
    @functools.wraps(nothing)
    def traced(*args: Any) -> Any:
        return nothing(*args)

    store = define_activity_store(
        load_activities=traced, save_activities=functools.partial(nothing, 1)
    )
    assert await store.load_activities("t") == []


# ----------------------------------------------------------------- what entry points ask


async def test_chat_needs_messages_and_runs_beside_interrupts(memory: Persistence) -> None:
    with_persistence(memory)
    with_persistence(compose_persistence(memory, overrides={"interrupts": False, "runs": False}))
    with pytest.raises(CompositionError, match="with_persistence needs a messages store"):
        with_persistence(compose_persistence(memory, overrides={"messages": False, "runs": False}))
    with pytest.raises(CompositionError, match="interrupts store needs a runs store"):
        with_persistence(compose_persistence(memory, overrides={"runs": False}))


@pytest.mark.parametrize("given", ["sqlite:///chat.db", None, {}, memory_persistence])
async def test_what_is_no_persistence_is_told_how_to_make_one(given: Any) -> None:
    with pytest.raises(CompositionError, match=r"with_persistence needs a persistence, not .*make"):
        with_persistence(given)
    with pytest.raises(CompositionError, match=r"needs a persistence, not .*make one with"):
        await hydrate_thread(given, "t")


async def test_reading_needs_messages_only(memory: Persistence) -> None:
    only = define_persistence({"messages": memory.stores.messages})
    assert (await hydrate_thread(only, "t"))["messages"] == []
    with pytest.raises(CompositionError, match="needs a messages store"):
        await hydrate_thread(define_persistence({"runs": memory.stores.runs}), "t")


async def test_a_missing_tier_is_named_with_its_store(memory: Persistence) -> None:
    plain = define_message_store(load_thread=nothing, save_thread=nothing)
    bag = compose_persistence(memory, overrides={"messages": plain})
    require(memory, "paging", tiers={"messages": [PagedMessages]})
    with pytest.raises(
        CompositionError,
        match="paging needs PagedMessages of the messages store, which define_message_store",
    ):
        require(bag, "paging", tiers={"messages": [PagedMessages]})


async def test_capabilities_name_the_tiers_of_each_present_store(memory: Persistence) -> None:
    plain = define_message_store(load_thread=nothing, save_thread=nothing)
    bag = compose_persistence(memory, overrides={"messages": plain, "metadata": False})
    assert capabilities(bag) == {
        "messages": set(),
        "runs": {"RunHistory", "RunTree", "ReclaimableRuns", "TurnBackend"},
        "interrupts": {"BatchCommit", "TurnBackend"},
        "activities": {"TurnBackend"},
    }
    assert capabilities(memory)["metadata"] == {"VersionedMetadata", "TurnBackend"}
    assert capabilities(memory)["messages"] == {
        "RevisionedMessages",
        "PagedMessages",
        "CutArchive",
        "TurnBackend",
    }


# --------------------------------------------------------------------------- scoped bags


class ScopedActivities:
    def __init__(self, owner: str = "") -> None:
        self.owner = owner

    def scoped(self, scope: Scope) -> ScopedActivities:
        return ScopedActivities(scope.user_id or "")

    async def load_activities(self, thread_id: str) -> Any:
        return [self.owner]

    async def save_activities(self, thread_id: str, activities: Any) -> None: ...


async def test_a_scoped_bag_scopes_every_store_or_says_which_one_cannot(
    memory: Persistence,
) -> None:
    scope = Scope(user_id="u")
    mixed = compose_persistence(memory, overrides={"activities": ScopedActivities()})
    view = mixed.scoped(scope)
    assert await view.stores.activities.load_activities("t") == ["u"]
    await view.stores.messages.save_thread("t", [{"role": "user", "content": "x"}])
    assert await mixed.stores.messages.load_thread("t") == []
    assert len(await mixed.scoped(scope).stores.messages.load_thread("t")) == 1
    assert [b.scope for b in view.backends] == [scope]
    stores = view.stores
    assert stores.messages.backend is stores.runs.backend

    plain = define_activity_store(load_activities=nothing, save_activities=nothing)
    unscoped = compose_persistence(memory, overrides={"activities": plain})
    with pytest.raises(CompositionError, match=r"activities store \(define_activity_store\) knows"):
        unscoped.scoped(scope)
