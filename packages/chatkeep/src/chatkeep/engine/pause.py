"""What a pause consists of: its interrupts, and what the browser is shown with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chatkeep.engine import events
from chatkeep.engine.interrupts import Batch, Descriptor, InterruptDefinition, InterruptRequest
from chatkeep.engine.middleware import Event
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.snapshot import thread_snapshot
from chatkeep.errors import CompositionError
from chatkeep.records import UNSET

__all__ = ["Pause", "check_requests", "prepare"]


@dataclass(frozen=True, slots=True)
class Pause:
    """The run waits for answers to ``interrupts``. ``shown`` is published when they are kept."""

    interrupts: list[Descriptor]
    shown: list[Event]


async def prepare(runtime: Runtime, batch: Batch) -> Pause:
    """Make everything that a pause shows, and take it through ``on_chunk``: a hook that refuses
    it fails the run while nothing of the pause is kept.

    Raises:
        Aborted: the run is to stop.
    """
    context, publisher = runtime.context, runtime.publisher
    publisher.close_spans()
    await publisher.flush()
    shown = await publisher.hold(thread_snapshot(context))
    if context.client_state is not UNSET and context.client_state is not None:
        shown += await publisher.hold(events.state_snapshot(context.client_state))
    await publisher.flush()
    runtime.gate.check()
    return Pause(batch.descriptors(), shown)


def check_requests(
    requests: Sequence[InterruptRequest], definitions: Sequence[InterruptDefinition]
) -> None:
    """Refuse a question whose answer nobody could check.

    Raises:
        CompositionError: the chat does not know the definition.
    """
    if not requests:
        return
    known = {definition.id for definition in definitions}
    for request in requests:
        given: object = request
        if not isinstance(given, InterruptRequest):
            raise CompositionError(
                f"on_interrupt_boundary returned {given!r}; it may return requests, made with "
                "definition.request(…)"
            )
        if request.definition.id not in known:
            raise CompositionError(
                f"a middleware asks {request.definition.id!r}, which this chat does not know: "
                "give its definition to chat(interrupts=[…])"
            )
