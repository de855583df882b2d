"""How a page answers what waits for its user: staging, and the batch that is posted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from chatkeep.testkit._client_rows import Part, settle
from chatkeep.testkit.client import ChatView

__all__ = ["Answers"]

BINDING: Final = "tanstack:interruptBinding"
_PAYLOAD: Final = "tanstack:interruptPayload"
_CONTINUATION: Final = "tanstack:interruptContinuation"
_ECHOED: Final[tuple[str, ...]] = (
    "definitionId",
    "key",
    "batchIndex",
    "responseSchemaHash",
    "payloadSchemaHash",
)


class Answers:
    """A page with questions on it.

    Every method takes ``which``: the id of an interrupt, its tool call's id or its tool's name;
    None is the only one of that kind.
    """

    def __init__(self) -> None:
        self.view = ChatView()
        self.live_pause = False
        """Whether this page saw the run pause, rather than loaded it so."""
        self._staged: dict[str, dict[str, Any]] = {}

    def show(self, view: ChatView) -> None:
        """Show another state: a page load. What was staged is forgotten."""
        self.view = view
        self.live_pause = False
        self._staged = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the page shows."""
        return self.view.messages

    @property
    def pending(self) -> list[dict[str, Any]]:
        """The descriptors that this chat's page has to answer; foreign ones are not among
        them."""
        return [d for d in self.view.interrupts if d.get("owner", True) and _binding(d)]

    def approve(self, which: str | None = None, **fields: Any) -> None:
        """Allow a call; ``editedArgs`` and ``payload`` go along."""
        self._decide(which, approved=True, fields=fields)

    def deny(self, which: str | None = None, **fields: Any) -> None:
        """Refuse a call; ``payload`` goes along."""
        self._decide(which, approved=False, fields=fields)

    def output(self, which: str | None = None, value: Any = None) -> None:
        """What a tool of the browser returned."""
        descriptor = self._question("client-tool-execution", which)
        self._stage(descriptor, "resolved", payload=value)
        content = value if isinstance(value, str) else _compact(value)
        self._result(descriptor, content, None)

    def fail(self, which: str | None = None, text: str = "failed", *, marked: bool = False) -> None:
        """A tool of the browser failed. ``marked`` says so in the entry's metadata, as newer
        clients do; client 0.33 says it in the tool's row only."""
        descriptor = self._question("client-tool-execution", which)
        self._stage(descriptor, "resolved", payload={"error": text})
        if marked:
            entry = self._staged[descriptor["id"]]
            entry["metadata"] = {"tanstack": {"state": "output-error"}}
        self._result(descriptor, "null", text)

    def answer(self, which: str | None = None, response: Any = None) -> None:
        """Answer a generic question."""
        descriptor = self._question("generic", which)
        self._stage(descriptor, "resolved", payload=response)
        entry = self._staged[descriptor["id"]]
        entry["metadata"] = {_CONTINUATION: _continuation(descriptor)}

    def cancel(self, which: str | None = None) -> None:
        """Withdraw one question, or all of them."""
        chosen = self.pending if which is None else [self._question(None, which)]
        for descriptor in chosen:
            self._stage(descriptor, "cancelled")

    def batch(self) -> dict[str, Any]:
        """The fields of a post that carries what was staged, which is forgotten then."""
        entries = [self._staged[key] for key in sorted(self._staged)]
        self._staged = {}
        return {"parentRunId": self.view.paused_run, "resume": entries}

    # -- pieces -------------------------------------------------------------------------

    def _question(self, kind: str | None, which: str | None) -> dict[str, Any]:
        of_kind = [d for d in self.pending if kind is None or _binding(d)["kind"] == kind]
        found = [d for d in of_kind if which is None or which in _names(d)]
        if len(found) != 1:
            waiting = [(_binding(d)["kind"], _names(d)) for d in self.pending]
            raise AssertionError(f"{len(found)} questions {which!r}; there are: {waiting}")
        return found[0]

    def _stage(self, descriptor: Mapping[str, Any], status: str, **fields: Any) -> None:
        entry = {"interruptId": descriptor["id"], "status": status, **fields}
        self._staged[descriptor["id"]] = entry

    def _decide(self, which: str | None, *, approved: bool, fields: Mapping[str, Any]) -> None:
        descriptor = self._question("tool-approval", which)
        self._stage(descriptor, "resolved", payload={"approved": approved, **fields})
        found = self._call(descriptor)
        if self.live_pause and found is not None:
            found[1].update(state="approval-responded", approval={"approved": approved})

    def _result(self, descriptor: Mapping[str, Any], content: str, error: str | None) -> None:
        found = self._call(descriptor)
        if found is not None:
            settle(*found, content, error, f"tool-{descriptor['toolCallId']}")

    def _call(self, descriptor: Mapping[str, Any]) -> tuple[dict[str, Any], Part] | None:
        for message in self.messages:
            for part in message["parts"]:
                if part["type"] == "tool-call" and part["id"] == descriptor.get("toolCallId"):
                    return message, part
        return None


def _binding(descriptor: Mapping[str, Any]) -> dict[str, Any]:
    metadata: Mapping[str, Any] = descriptor.get("metadata") or {}
    binding: dict[str, Any] = metadata.get(BINDING) or {}
    return binding


def _names(descriptor: Mapping[str, Any]) -> list[str]:
    metadata: Mapping[str, Any] = descriptor.get("metadata") or {}
    keys = (descriptor["id"], descriptor.get("toolCallId"), metadata.get("toolName"))
    return [key for key in (*keys, _binding(descriptor).get("key")) if key is not None]


def _continuation(descriptor: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a generic question, said back to the server that asked it."""
    binding = _binding(descriptor)
    keys = ("reason", "message", "expiresAt")
    said = {key: descriptor[key] for key in keys if key in descriptor}
    echoed = {key: binding[key] for key in _ECHOED if key in binding}
    shown = descriptor["metadata"]
    payload = {"payload": shown[_PAYLOAD]} if _PAYLOAD in shown else {}
    return {"v": 1, **said, **echoed, **payload}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
