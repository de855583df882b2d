"""What the model calls of a run are made of, as hooks leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from chatkeep.engine.middleware import ChatConfig, ChatMiddleware, Phase
from chatkeep.engine.options import RunOptions
from chatkeep.engine.runtime import Runtime
from chatkeep.engine.tools import Tool, tools_by_name
from chatkeep.errors import CompositionError

__all__ = ["Configuration"]

_FIELDS: Final = frozenset(f.name for f in fields(ChatConfig))


class Configuration:
    """The live :class:`ChatConfig` of a run, and its tools by name."""

    __slots__ = ("_runtime", "config", "tools")

    def __init__(self, runtime: Runtime, options: RunOptions) -> None:
        self._runtime = runtime
        self.config = ChatConfig(
            messages=options.messages,
            provider_messages=list(options.messages),
            system_prompts=options.system_prompts,
            tools=options.tools,
            resume=options.resume,
            resume_tool_state=None,
            metadata=options.metadata,
            model_options=options.model_options,
            activities=options.activities,
            interrupts=options.interrupts,
        )
        self.tools: dict[str, Tool] = {}

    async def refresh(
        self, phase: Phase, *, schema: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The ``on_config`` pipeline. What it makes of the messages lasts; what it makes of
        ``provider_messages`` is for the next call. With ``schema``, that call is a separate one
        for structured output: ``on_structured_output_config`` comes first, and may change the
        schema, which is returned."""
        runtime = self._runtime
        context = runtime.context
        context.phase = phase
        config = replace(self.config)
        if phase != "init":
            config.messages, config.activities = context.messages, context.activities
        config.provider_messages = list(config.messages)
        before, rows = config.messages, config.activities
        asked = schema or {}
        with runtime.gate:
            if schema is not None:
                for middleware, hook in runtime.hooks.of("on_structured_output_config"):
                    patch = dict(await hook(context, config, asked) or {})
                    asked = patch.pop("output_schema", asked)
                    config = _patched(config, patch, middleware)
            for middleware, hook in runtime.hooks.of("on_config"):
                patch = await hook(context, config)
                if patch:
                    config = _patched(config, patch, middleware)
        self.config = config
        if phase == "init" or config.messages is not before:
            runtime.transcript.replace(config.messages)
        if phase == "init":
            runtime.activities.begin(config.activities)
        elif config.activities is not rows:
            runtime.activities.replace(config.activities)
        self.tools = tools_by_name(config.tools)
        context.system_prompts = list(config.system_prompts)
        context.model_options = dict(config.model_options)
        context.tool_names = list(self.tools)
        await runtime.publisher.flush()
        return asked


def _patched(
    config: ChatConfig, patch: Mapping[str, Any], middleware: ChatMiddleware
) -> ChatConfig:
    unknown = set(patch) - _FIELDS
    if unknown:
        raise CompositionError(
            f"on_config of {middleware.name or type(middleware).__name__} returned unknown "
            f"fields: {', '.join(sorted(unknown))}"
        )
    values = dict(patch)
    if "messages" in values and "provider_messages" not in values:
        values["provider_messages"] = list(values["messages"])
    return replace(config, **values)
