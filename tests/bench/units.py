"""What DynamoDB bills: read and write units, by the service's own account where it keeps one, and
by its rules from what was sent and received."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bench.data import answer, question
from chatkeep.backends import Backend, new_commit_id
from chatkeep.records import ModelMessage, RunPatch
from chatkeep.stores import RunStart, Splice, TurnCommit, ViewQuery
from chatkeep_dynamodb.items import from_wire, item_size

__all__ = ["Units", "units_by_size"]

_WRITE, _READ = 1024, 4096


@dataclass
class Units:
    """A meter on a boto3 client. ``written`` and ``read`` follow the documented rules (writes of
    an index are not among them); ``consumed`` is what the service says."""

    written: float = 0
    read: float = 0
    consumed: float = 0
    requests: Counter[str] = field(default_factory=Counter[str])

    def attach(self, client: Any) -> None:
        """Count what this client sends from now on."""
        events = client.meta.events
        events.register("provide-client-params.dynamodb", self._sent)
        events.register("after-call.dynamodb", self._received)

    def clear(self) -> None:
        """Begin anew."""
        self.written = self.read = self.consumed = 0
        self.requests.clear()

    def _sent(self, params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
        self.requests[model.name] += 1
        match model.name:
            case "TransactWriteItems":
                self.written += sum(2 * _row_units(part) for part in params["TransactItems"])
            case "PutItem":
                self.written += _row_units({"Put": params})
            case "UpdateItem" | "DeleteItem":
                self.written += 1
            case "BatchWriteItem":
                for requests in params["RequestItems"].values():
                    self.written += sum(map(_row_units, requests))
            case "Query" | "GetItem" | "BatchGetItem":
                pass
            case _:
                return params
        return {**params, "ReturnConsumedCapacity": "TOTAL"}

    def _received(self, parsed: dict[str, Any], model: Any, **_: Any) -> None:
        consumed: Any = parsed.get("ConsumedCapacity", [])
        if isinstance(consumed, dict):
            consumed = [consumed]
        parts: list[Any] = consumed
        self.consumed += sum(float(part["CapacityUnits"]) for part in parts)
        match model.name:
            case "Query":
                size = sum(_size(item) for item in parsed.get("Items", []))
                self.read += max(1, math.ceil(size / _READ))
            case "GetItem":
                self.read += max(1, math.ceil(_size(parsed.get("Item", {})) / _READ))
            case "BatchGetItem":
                for items in parsed.get("Responses", {}).values():
                    self.read += sum(math.ceil(_size(item) / _READ) for item in items)
            case _:
                pass


def _size(wire: dict[str, Any]) -> int:
    return item_size(from_wire(wire))


def _row_units(part: dict[str, Any]) -> int:
    """Write units of one row, plain; of a row that is removed or looked at, one."""
    ((_, request),) = part.items()
    return math.ceil(_size(request["Item"]) / _WRITE) if "Item" in request else 1


async def units_by_size(backend: Backend, meter: Units) -> dict[str, str]:
    """Units of both boundaries of a turn and of a reload, by the size of its messages."""
    found: dict[str, str] = {}
    for size in (1, 4, 16, 64):
        thread, run = f"units-{size}", f"units-run-{size}"
        text = "x" * (size * 1024 - 700)

        def sized(message: ModelMessage, content: str = text) -> ModelMessage:
            return {**message, "content": content}

        parts: list[str] = []
        meter.clear()
        started = await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                run=RunStart(run_id=run, started_at=1, lease_token="k"),
                splice=Splice(keep_through=0, tail=[sized(question())]),
            )
        )
        # The first boundary of a thread looks whether there is one.
        parts.append(f"start {meter.written:g} written in {meter.requests.total()} requests")
        meter.clear()
        await backend.commit_turn(
            TurnCommit(
                commit_id=new_commit_id(),
                thread_id=thread,
                run_id=run,
                lease_token="k",
                run=RunPatch(status="completed", finished_at=2),
                splice=Splice(
                    keep_through=started.newest,
                    tail=[sized(answer()[-1])],
                    expected=started.revision,
                ),
            )
        )
        parts.append(f"end {meter.written:g} in {meter.requests.total()}")
        meter.clear()
        await backend.read_view(thread, ViewQuery())
        parts.append(f"reload {meter.read:g} read in {meter.requests.total()}")
        if meter.consumed:
            parts.append(f"the service says {meter.consumed:g}")
        found[f"units, messages of {size} kB"] = ", ".join(parts)
    return found
