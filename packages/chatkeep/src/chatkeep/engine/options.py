"""What a run is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatkeep.engine.adapter import ModelAdapter
from chatkeep.engine.interrupts import InterruptDefinition
from chatkeep.engine.middleware import ChatMiddleware, LoopState
from chatkeep.engine.output_schema import OutputSchema
from chatkeep.engine.structured_answer import StructuredMode
from chatkeep.engine.tool_phase import ToolExecution
from chatkeep.engine.tools import Tool
from chatkeep.records import ActivityRecord, ModelMessage

__all__ = ["LoopStrategy", "RunOptions"]

LoopStrategy = Callable[[LoopState], bool]
"""Whether another model turn may follow. Asked after a tool phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything a run is started with, checked and converted by ``chat()``."""

    adapter: ModelAdapter
    messages: list[ModelMessage]
    activities: list[ActivityRecord]
    thread_id: str
    run_id: str
    parent_run_id: str | None
    resume: list[dict[str, Any]]
    interrupts: list[InterruptDefinition]
    system_prompts: list[str]
    tools: list[Tool]
    middleware: tuple[ChatMiddleware, ...]
    loop: LoopStrategy
    tool_execution: ToolExecution
    model_options: dict[str, Any]
    metadata: dict[str, Any]
    context: Any
    seen: int | None
    state: Any
    forwarded_props: dict[str, Any]
    output: OutputSchema | None = None
    structured: StructuredMode = "separate"
