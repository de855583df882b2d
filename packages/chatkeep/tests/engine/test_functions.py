"""Plain functions as tools: schemas from type hints, binding, contexts."""

import dataclasses
from typing import Annotated, Any, Literal

import pytest
from ag_ui.core import RunFinishedEvent, ToolCallArgsEvent, ToolCallEndEvent, ToolCallStartEvent
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from chatkeep.engine import Event, Tool, ToolContext, chat, tool
from chatkeep.errors import ToolError
from chatkeep.testkit.played import PlayedModel, collect

pytestmark = pytest.mark.anyio


async def run(item: Tool, arguments: str) -> str:
    """Content of the one result of a call."""
    turn: list[Event] = [
        ToolCallStartEvent(tool_call_id="c", tool_call_name=item.name),
        ToolCallArgsEvent(tool_call_id="c", delta=arguments),
        ToolCallEndEvent(tool_call_id="c"),
        RunFinishedEvent(thread_id="t", run_id="r", finishReason="tool_calls"),
    ]
    stream = chat(adapter=PlayedModel(turn), messages=[], tools=[item], loop=1, context="who")
    events = [event.model_dump(by_alias=True) for event in await collect(stream)]
    (content,) = [e["content"] for e in events if e["type"] == "TOOL_CALL_RESULT"]
    return str(content)


@tool
def add(a: int, b: Annotated[int, Field(description="the second")] = 2) -> int:
    """Add two
    numbers.

    More that the model need not read.
    """
    return a + b


def test_the_schema_comes_from_the_signature() -> None:
    assert add.name == "add"
    assert add.description == "Add two numbers."
    assert add.input_schema is not None
    assert add.input_schema["required"] == ["a"]
    assert add.input_schema["additionalProperties"] is False
    assert add.input_schema["properties"]["a"]["type"] == "integer"
    assert add.input_schema["properties"]["b"]["description"] == "the second"
    assert add.input_schema["properties"]["b"]["default"] == 2
    assert add.output_schema is None


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ('{"a":1}', "3"),
        ('{"a":1,"b":5}', "6"),
        ("{}", '{"error":"Input validation failed for tool add: a: Field required"}'),
        (
            '{"a":1,"c":1}',
            '{"error":"Input validation failed for tool add: c: Extra inputs are not permitted"}',
        ),
        (
            "[1]",
            (
                '{"error":"Input validation failed for tool add: Input should be a valid '
                'dictionary or instance of add"}'
            ),
        ),
    ],
)
async def test_arguments_are_bound_by_name(arguments: str, content: str) -> None:
    assert await run(add, arguments) == content


class Place(BaseModel):
    """Where."""

    city: str
    unit: Literal["C", "F"] = "C"


class Weather(BaseModel):
    temp: int


async def test_one_pydantic_model_is_the_arguments() -> None:
    @tool(name="weather", description="Look.")
    async def look(place: Place, ctx: ToolContext) -> Weather:
        assert isinstance(place, Place)
        return Weather(temp=len(place.city) + len(ctx.context))

    assert look.name == "weather"
    assert look.description == "Look."
    assert look.input_schema is not None
    assert set(look.input_schema["properties"]) == {"city", "unit"}
    assert look.output_schema is not None
    assert look.output_schema["required"] == ["temp"]
    assert await run(look, '{"city":"Oslo"}') == '{"temp":7}'


async def test_several_parameters_may_be_models_containers_and_unions() -> None:
    @tool
    def many(places: list[Place], home: Place | None = None, *, tags: dict[str, int]) -> str:
        return f"{[p.city for p in places]} {home} {tags}"

    result = await run(many, '{"places":[{"city":"A"}],"tags":{"x":1}}')
    assert result == "['A'] None {'x': 1}"


async def test_names_that_a_model_would_refuse_are_fine_for_parameters() -> None:
    @tool
    def odd(schema: str, copy: int, _hidden: bool = False) -> str:
        return f"{schema} {copy} {_hidden}"

    assert await run(odd, '{"schema":"s","copy":1,"_hidden":true}') == "s 1 True"


async def test_parameters_without_hints_take_anything() -> None:
    @tool
    def loose(x):  # type: ignore[no-untyped-def]
        return x

    assert await run(loose, '{"x":[1,{"y":2}]}') == '[1,{"y":2}]'


class Row(TypedDict):
    n: int


@dataclasses.dataclass
class Point:
    x: int


async def test_structured_return_types_are_checked() -> None:
    @tool
    def row(n: Any) -> Row:
        return {"n": n}

    @tool
    def point() -> Point:
        return Point(3)

    assert await run(row, '{"n":1}') == '{"n":1}'
    assert "Output validation failed" in await run(row, '{"n":"x"}')
    assert await run(point, "{}") == '{"x":3}'


async def test_a_given_output_schema_wins() -> None:
    @tool(output_schema={"type": "string"})
    def row() -> Row:
        return {"n": 1}

    assert "Output validation failed" in await run(row, "{}")


async def test_objects_with_call_are_tools() -> None:
    class Adder:
        """Adds."""

        def __init__(self, by: int) -> None:
            self.by = by

        async def __call__(self, n: int) -> int:
            return n + self.by

    assert await run(tool(name="plus")(Adder(3)), '{"n":1}') == "4"


async def test_bound_methods_are_tools() -> None:
    class Counter:
        total = 0

        def count(self, by: int) -> int:
            """Count."""
            self.total += by
            return self.total

    assert await run(tool(Counter().count), '{"by":2}') == "2"


async def test_types_of_the_enclosing_function_are_found() -> None:
    class Local(BaseModel):
        n: int

    namespace = {"tool": tool, "Local": Local}

    def define() -> Tool:
        Inner = Local  # noqa: N806

        @tool
        def use(value: "Inner") -> int:
            return value.n

        return use

    assert namespace
    assert await run(define(), '{"n":4}') == "4"


def test_signatures_that_no_schema_describes_are_refused() -> None:
    with pytest.raises(ToolError, match=r"\*args"):

        @tool
        def star(*args: int) -> None: ...

    with pytest.raises(ToolError, match="cannot be resolved"):

        @tool
        def missing(x: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    class Opaque:
        pass

    with pytest.raises(ToolError, match="parameters"):

        @tool
        def opaque(x: Opaque) -> None: ...
