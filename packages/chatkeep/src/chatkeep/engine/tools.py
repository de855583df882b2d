"""Tools: Python functions, or raw JSON Schemas with something to execute, that a model may call.

A server tool has ``execute``; a client tool has none and runs in the browser.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast, overload

import anyio
import anyio.from_thread
import pydantic
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from chatkeep.engine.abort import AbortSignal
from chatkeep.engine.schema import (
    Parameters,
    Problem,
    SchemaValidator,
    output_schema_of,
    parameters_of,
    pydantic_issue,
)
from chatkeep.errors import ToolError

if TYPE_CHECKING:
    from chatkeep.engine.interrupts.resume import Decision

__all__ = [
    "InvalidArguments",
    "Tool",
    "ToolContext",
    "client_tool",
    "client_tools_of_request",
    "define_tool",
    "tool",
    "tools_by_name",
]

WORKER_THREADS: Final = 40
"""How many synchronous tools run at once in one event loop."""

_limiter: RunVar[CapacityLimiter] = RunVar("chatkeep_tool_threads")
_NAME: Final = re.compile(r"\S(.*\S)?\Z", re.DOTALL)


class InvalidArguments(ToolError):
    """Arguments that do not fit a tool's input schema; the message is the first issue."""

    code = "invalid-arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a running tool may know and do. Ask for it with a parameter annotated so.

    ``context`` is what ``chat(context=…)`` was given. ``abort`` goes off when the run is to
    stop; an ``async`` tool is cancelled then, a synchronous one may look at it. ``approval`` is
    what was decided about the call, with the payload that was said along; None: nobody was asked.
    """

    tool_call_id: str
    tool_name: str
    thread_id: str
    run_id: str
    context: Any
    abort: AbortSignal
    _emit: Callable[[str, Any], Coroutine[Any, Any, None]] = field(repr=False)
    approval: Decision | None = None

    async def emit_custom_event(self, name: str, value: Any = None) -> None:
        """Publish a CUSTOM event now, before the tool's result.

        ``toolCallId`` is added to an object, and cannot be overridden; any other value becomes
        ``{"value": …, "toolCallId": …}``.

        Raises:
            InvalidValue: ``value`` is not JSON.
        """
        await self._emit(name, value)

    def emit_custom_event_from_thread(self, name: str, value: Any = None) -> None:
        """:meth:`emit_custom_event` for synchronous tools; returns when it is published."""
        anyio.from_thread.run(self._emit, name, value)


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. Make it with :func:`tool`, :func:`define_tool` or :func:`client_tool`.

    ``input_schema`` and ``output_schema`` are JSON Schemas, exactly as given; None: anything
    goes. ``execute`` None makes it a client tool.

    ``approval_schema`` describes what a person may say besides yes or no: one schema for both
    answers, or ``{"approve": …, "reject": …}``; None: nothing.

    A browser compares hashes of its own tool's schemas with those of an interrupt. Where it
    exports them in another form, ``input_schema_hash`` and ``output_schema_hash`` carry what it
    computes (``sha256:…``).
    """

    name: str
    _: KW_ONLY
    description: str = ""
    input_schema: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None
    needs_approval: bool = False
    approval_schema: dict[str, Any] | None = None
    input_schema_hash: str | None = None
    output_schema_hash: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    execute: Callable[[Any, ToolContext], Awaitable[Any]] | None = field(default=None, repr=False)
    """JSON arguments and context to the result; from :func:`tool` it binds and validates."""
    from_request: bool = False
    """Whether a browser brought it along: nothing here spends time on its schemas."""
    _parameters: Parameters | None = field(default=None, repr=False)
    _function: Callable[..., Any] | None = field(default=None, repr=False)
    _input: SchemaValidator | None = field(default=None, init=False, repr=False)
    _output: SchemaValidator | None = field(default=None, init=False, repr=False)
    _branches: dict[bool, SchemaValidator] = field(
        default_factory=dict[bool, SchemaValidator], init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ToolError(f"a tool needs a name that does not begin or end blank: {self.name!r}")
        for slot, schema in (("_input", self.input_schema), ("_output", self.output_schema)):
            if schema is not None and not (slot == "_input" and self._parameters is not None):
                what = f"{slot[1:]}_schema of tool {self.name}"
                object.__setattr__(self, slot, SchemaValidator(schema, what))
        for approved, schema in zip((True, False), self.approval_branches, strict=True):
            if schema is not None:
                what = f"approval_schema of tool {self.name}"
                if not isinstance(cast("object", schema), Mapping):
                    raise ToolError(f"{what} must be a JSON Schema object")
                self._branches[approved] = SchemaValidator(schema, what)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function that the tool was made of, called as it was written, without checks or
        conversions: so it can be tested, and used by other code. What an ``async`` function
        returns is awaited by the caller.

        Raises:
            ToolError: a client tool: there is no function here.
        """
        function = self._function or self.execute
        if function is None:
            raise ToolError(f"tool {self.name} runs in the browser: there is nothing to call here")
        return function(*args, **kwargs)

    @property
    def approval_branches(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Schemas of what may be said along with yes, and along with no; None: nothing."""
        schema = self.approval_schema
        if schema is None:
            return None, None
        if schema and schema.keys() <= {"approve", "reject"}:
            return schema.get("approve"), schema.get("reject")
        return schema, schema

    def approval_problem(self, value: Any, *, approved: bool) -> Problem | None:
        """What is wrong with the payload of a decision; None when it fits."""
        branch = self._branches.get(approved)
        return None if branch is None else branch.problem(value)

    @property
    def is_client(self) -> bool:
        """Whether the tool runs in the browser."""
        return self.execute is None

    def check_input(self, args: Any) -> None:
        """Refuse arguments that do not fit.

        Raises:
            InvalidArguments: the message says where and why.
        """
        if self._parameters is not None:
            try:
                self._parameters.bind(args)
            except pydantic.ValidationError as error:
                raise InvalidArguments(pydantic_issue(error)) from error
        elif self._input is not None:
            issue = self._input.issue(args)
            if issue is not None:
                raise InvalidArguments(issue)

    def output_problem(self, value: Any) -> Problem | None:
        """What is wrong with a result, and where; None when it fits or nothing is asked."""
        return None if self._output is None else self._output.problem(value)

    def output_issue(self, value: Any) -> str | None:
        """:meth:`output_problem` in one line."""
        problem = self.output_problem(value)
        return None if problem is None else str(problem)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


async def _call(function: Callable[[], Any], *, is_async: bool) -> Any:
    """Call it here, or in a worker thread that is abandoned when the run is stopped."""
    if is_async:
        return await function()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(WORKER_THREADS)
        _limiter.set(limiter)
    result = await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)
    return await result if inspect.isawaitable(result) else result


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    output_schema: dict[str, Any] | None = None,
    needs_approval: bool = False,
    approval_schema: Mapping[str, Any] | None = None,
    input_schema_hash: str | None = None,
    output_schema_hash: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    output_schema: dict[str, Any] | None = None,
    needs_approval: bool = False,
    approval_schema: Mapping[str, Any] | None = None,
    input_schema_hash: str | None = None,
    output_schema_hash: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a server tool of a function; use it bare or with options.

    The input schema comes from the type hints (``Annotated[str, Field(description=…)]`` for
    descriptions), or from the one pydantic model that the function takes; a parameter annotated
    :class:`ToolContext` gets the context. The description is the docstring's first paragraph. A
    structured return type gives the output schema. A synchronous function runs in a worker
    thread. The tool can be called as the function could.

    Raises:
        ToolError: the signature cannot be described by a JSON Schema.
    """
    scope = sys._getframe(1).f_locals  # noqa: SLF001 - types defined beside the function

    def make(target: Callable[..., Any]) -> Tool:
        parameters = parameters_of(target, ToolContext, scope)
        is_async = _is_async(target)

        async def execute(args: Any, context: ToolContext) -> Any:
            bound = parameters.bind(args)
            if parameters.context is not None:
                bound[parameters.context] = context
            return await _call(lambda: target(**bound), is_async=is_async)

        return Tool(
            name or str(getattr(target, "__name__", type(target).__name__)),
            description=_summary(target) if description is None else description,
            input_schema=parameters.schema,
            output_schema=output_schema_of(target, scope)
            if output_schema is None
            else output_schema,
            needs_approval=needs_approval,
            approval_schema=None if approval_schema is None else dict(approval_schema),
            input_schema_hash=input_schema_hash,
            output_schema_hash=output_schema_hash,
            metadata=dict(metadata or {}),
            execute=execute,
            _parameters=parameters,
            _function=target,
        )

    return make if function is None else make(function)


def _summary(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function) or ""
    return " ".join(text.split("\n\n", 1)[0].split())


def define_tool(
    *,
    name: str,
    execute: Callable[..., Any],
    description: str = "",
    input_schema: Mapping[str, Any] | None = None,
    output_schema: Mapping[str, Any] | None = None,
    needs_approval: bool = False,
    approval_schema: Mapping[str, Any] | None = None,
    input_schema_hash: str | None = None,
    output_schema_hash: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Tool:
    """Make a server tool of raw JSON Schemas.

    ``execute(args)`` or ``execute(args, context)`` gets the validated JSON arguments; it may be
    synchronous (a worker thread) or a coroutine function.

    Raises:
        ToolError: a schema is not valid, or ``execute`` takes something else.
    """
    required = [
        p
        for p in inspect.signature(execute).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not 1 <= len(required) <= 2:
        raise ToolError(f"execute of tool {name} takes (args) or (args, context)")
    with_context = len(required) == 2
    is_async = _is_async(execute)

    async def run(args: Any, context: ToolContext) -> Any:
        values = (args, context) if with_context else (args,)
        return await _call(lambda: execute(*values), is_async=is_async)

    return Tool(
        name,
        description=description,
        input_schema=None if input_schema is None else dict(input_schema),
        output_schema=None if output_schema is None else dict(output_schema),
        needs_approval=needs_approval,
        approval_schema=None if approval_schema is None else dict(approval_schema),
        input_schema_hash=input_schema_hash,
        output_schema_hash=output_schema_hash,
        metadata=dict(metadata or {}),
        execute=run,
        _function=execute,
    )


def client_tool(
    name: str,
    *,
    description: str = "",
    input_schema: Mapping[str, Any] | None = None,
    output_schema: Mapping[str, Any] | None = None,
    needs_approval: bool = False,
    approval_schema: Mapping[str, Any] | None = None,
    input_schema_hash: str | None = None,
    output_schema_hash: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Tool:
    """Make a tool that runs in the browser.

    Raises:
        ToolError: a schema is not valid.
    """
    return Tool(
        name,
        description=description,
        input_schema=None if input_schema is None else dict(input_schema),
        output_schema=None if output_schema is None else dict(output_schema),
        needs_approval=needs_approval,
        approval_schema=None if approval_schema is None else dict(approval_schema),
        input_schema_hash=input_schema_hash,
        output_schema_hash=output_schema_hash,
        metadata=dict(metadata or {}),
    )


def client_tools_of_request(tools: Sequence[Any]) -> list[Tool]:
    """Client tools from a request's ``tools[]`` (AG-UI models or their JSON).

    The browser repeats tools that the server defines, so names may clash: the caller lets the
    server's win. Of two equal names the first stays.

    Raises:
        ToolError: an entry has no name, or its ``parameters`` are no valid JSON Schema.
    """
    out: dict[str, Tool] = {}
    for entry in tools:
        data = _fields_of(entry)
        name = data.get("name")
        if not isinstance(name, str):
            raise ToolError(f"an entry of tools[] has no name: {entry!r}")
        parameters = data.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ToolError(f"parameters of tool {name} must be a JSON Schema object")
        if name not in out:
            out[name] = Tool(
                name,
                description=str(data.get("description") or ""),
                input_schema=dict(cast("Mapping[str, Any]", parameters)) if parameters else None,
                from_request=True,
            )
    return list(out.values())


def _fields_of(entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, Mapping):
        return cast("Mapping[str, Any]", entry)
    return {key: getattr(entry, key, None) for key in ("name", "description", "parameters")}


def tools_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name.

    Raises:
        ToolError: two have the same name.
    """
    out: dict[str, Tool] = {}
    for item in tools:
        if not isinstance(item, Tool):
            raise ToolError(f"not a tool: {item!r}; use @tool, define_tool or client_tool")
        if item.name in out:
            raise ToolError(f"two tools are called {item.name!r}; names must be unique")
        out[item.name] = item
    return out
