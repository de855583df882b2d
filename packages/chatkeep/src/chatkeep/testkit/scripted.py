"""A model that runs offline and does what the last user message says.

``SCENARIO:<name>``, optionally a space and a JSON object of options, plays a scenario; any other
text plays ``text``. What a scenario says depends on the tool results that came after that
message, so one scenario spans the turns of a run, and runs after a reload go on alike. Options
that are named like an argument of a call replace it.

A chat that plays them all gives :func:`scripted_tools`, :func:`scripted_interrupts`, a
:class:`ScriptedPauses` among its middleware, and :func:`scripted_schema` as ``output_schema``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ag_ui.core import RunErrorEvent

from chatkeep.engine.adapter import ModelRequest
from chatkeep.engine.middleware import Event
from chatkeep.engine.structured_answer import StructuredMode
from chatkeep.records import ModelMessage
from chatkeep.testkit._scripted_pauses import ScriptedPauses, scripted_interrupts
from chatkeep.testkit._scripted_scenes import SCENES, Scene, direction, scenario_of
from chatkeep.testkit._scripted_tools import (
    STRUCTURED_SCHEMA,
    TOOL_SCHEMAS,
    WIDGET,
    ScriptedFailure,
    browser_tools,
    scripted_tools,
)

__all__ = [
    "STRUCTURED_SCHEMA",
    "TOOL_SCHEMAS",
    "WIDGET",
    "ScriptedFailure",
    "ScriptedModel",
    "ScriptedPauses",
    "browser_tools",
    "scenarios",
    "scripted_interrupts",
    "scripted_mode",
    "scripted_schema",
    "scripted_tools",
]


def scenarios() -> tuple[str, ...]:
    """Names that :class:`ScriptedModel` plays, sorted."""
    return tuple(sorted(SCENES))


def scripted_schema(messages: Sequence[ModelMessage]) -> dict[str, Any] | None:
    """The ``output_schema`` of a request: of the scenario ``structured``, and of no other."""
    name, _, _ = scenario_of(messages)
    return dict(STRUCTURED_SCHEMA) if name == "structured" else None


def scripted_mode(messages: Sequence[ModelMessage]) -> StructuredMode:
    """How the scenario ``structured`` wants its answer made: its option ``as``."""
    if scripted_schema(messages) is None:
        return "native"
    _, options, _ = direction(messages)
    wanted = options.get("as")
    return wanted if wanted in ("separate", "event") else "native"


class ScriptedModel:
    """The model adapter. It keeps no state: one object serves any number of runs.

    Args:
        model: its name.
        structured_output: how it gives a structured answer; see
            :class:`chatkeep.engine.ModelAdapter`.
    """

    provider = "scripted"

    def __init__(
        self, model: str = "scripted-1", *, structured_output: StructuredMode = "native"
    ) -> None:
        self.model = model
        self.structured_output = structured_output

    async def stream(self, request: ModelRequest) -> AsyncIterator[Event]:
        """Play the scenario that the last user message names."""
        name, options, results = direction(request.messages)
        script = SCENES.get(name)
        if script is None:
            known = ", ".join(scenarios())
            yield RunErrorEvent(
                message=f"scenario {name!r} is unknown; there are: {known}",
                code="unknown-scenario",
            )
            return
        async for event in script(Scene(request, options, results)):
            yield event
