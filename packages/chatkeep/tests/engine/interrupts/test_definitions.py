"""Definitions of generic interrupts, what they ask, and what their answers become."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Annotated, Any, Literal, TypeAlias

import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError

from chatkeep.engine.interrupts import (
    GenericAnswer,
    InterruptDefinition,
    Resolutions,
    check_generic,
    define_interrupt,
    definitions_by_id,
    generic_descriptor,
    parse_binding,
    schema_hash,
)
from chatkeep.errors import InvalidValue, ToolError
from chatkeep.records import UNSET

TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


class Review(BaseModel):
    approved: bool
    note: str = ""


@dataclasses.dataclass
class Plan:
    title: str


def ask(definition: InterruptDefinition, **options: Any) -> Any:
    return definition.request(**{"key": "k", "reason": "r", "message": "m", **options})


def test_a_json_schema_is_hashed_as_it_is() -> None:
    definition = define_interrupt("plan", response=TITLE)
    assert definition.response_schema == TITLE
    assert definition.response_hash == schema_hash(TITLE)
    assert definition.payload_schema is None
    assert definition.payload_hash is None


def test_a_type_gives_its_schema_and_checks_by_itself() -> None:
    definition = define_interrupt("plan", response=Review, payload=Plan)
    assert definition.response_schema == Review.model_json_schema()
    assert definition.parse({"approved": True}) == Review(approved=True)
    assert definition.response_problem({"approved": True}) is None
    problem = definition.response_problem({"approved": "perhaps"})
    assert problem is not None
    assert problem.path == ("approved",)
    assert ask(definition, payload=Plan("x")).payload == {"title": "x"}
    with pytest.raises(InvalidValue, match=r"\$\.payload"):
        ask(definition, payload={"titel": "x"})


def test_plain_types_are_described_too() -> None:
    definition = define_interrupt("pick", response=Literal["red", "blue"])
    assert definition.response_problem("red") is None
    assert definition.response_problem("green") is not None
    assert definition.parse("red") == "red"


def test_without_a_schema_anything_is_an_answer() -> None:
    definition = define_interrupt("free")
    assert definition.response_problem({"a": [None]}) is None
    assert definition.parse({"a": 1}) == {"a": 1}


@pytest.mark.parametrize("wrong", ["", None, 1])
def test_a_definition_needs_an_id(wrong: Any) -> None:
    with pytest.raises(ToolError, match="id"):
        define_interrupt(wrong)


@pytest.mark.parametrize("options", [{"response": {"type": 7}}, {"payload": {"type": 7}}])
def test_a_schema_that_is_none_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match="of interrupt plan is not a valid JSON Schema"):
        define_interrupt("plan", **options)


def test_a_type_without_a_schema_is_refused() -> None:
    class Opaque:
        pass

    with pytest.raises(ToolError, match="no JSON Schema"):
        define_interrupt("plan", response=Opaque)


def test_definitions_have_names_of_their_own() -> None:
    one, other = define_interrupt("a"), define_interrupt("b")
    assert definitions_by_id([one, other]) == {"a": one, "b": other}
    with pytest.raises(ToolError, match="two interrupt definitions are called 'a'"):
        definitions_by_id([one, define_interrupt("a")])
    wrong: Any = ["a"]
    with pytest.raises(ToolError, match="define_interrupt"):
        definitions_by_id(wrong)


@pytest.mark.parametrize("field", ["key", "reason", "message"])
@pytest.mark.parametrize("wrong", ["", None, 1])
def test_a_request_has_three_texts(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        ask(define_interrupt("plan"), **{field: wrong})
    assert caught.value.path == f"$.{field}"


def test_a_payload_must_fit_what_is_shown() -> None:
    definition = define_interrupt("plan", payload=TITLE)
    assert ask(definition, payload={"title": "x"}).payload == {"title": "x"}
    for wrong in ({"title": 1}, None, {"title": float("nan")}):
        with pytest.raises(InvalidValue):
            ask(definition, payload=wrong)
    with pytest.raises(InvalidValue, match="shown with a payload"):
        ask(definition)


def test_without_a_payload_schema_a_payload_is_free_or_absent() -> None:
    definition = define_interrupt("plan")
    assert ask(definition).payload is UNSET
    assert ask(definition, payload=None).payload is None
    assert ask(definition, payload=(1, dt.date(2026, 1, 2))).payload == [1, "2026-01-02"]


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (None, None),
        (0, "1970-01-01T00:00:00.000Z"),
        (1_796_041_110_680, "2026-11-30T12:18:30.680Z"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "2026-01-01T00:00:00.000Z"),
        (
            dt.datetime(2026, 1, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))),
            "2026-01-01T00:00:00.000Z",
        ),
        ("2026-01-01T00:00:00+02:00", "2026-01-01T00:00:00+02:00"),
    ],
)
def test_expiry_goes_on_the_wire_as_iso_text(moment: Any, text: str | None) -> None:
    assert ask(define_interrupt("plan"), expires_at=moment).expires_at == text


NAIVE = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None)


@pytest.mark.parametrize("wrong", ["soon", "", True, 1.5, NAIVE, 10**20, -(10**20), [], {}])
def test_expiry_that_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        ask(define_interrupt("plan"), expires_at=wrong)
    assert caught.value.path == "$.expires_at"


# ----------------------------------------------------------------------------- resolutions


def answer(definition_id: str, index: int, **options: Any) -> GenericAnswer:
    return GenericAnswer(
        definition_id=definition_id,
        key=f"k{index}",
        interrupt_id=f"i{index}",
        batch_index=index,
        **{"status": "resolved", **options},
    )


def test_resolutions_are_found_by_definition_in_the_type_it_was_made_with() -> None:
    review, free = define_interrupt("review", response=Review), define_interrupt("free")
    answers = [
        answer("review", 0, response={"approved": True}),
        answer("free", 1, response={"approved": True}),
        answer("review", 2, status="cancelled"),
    ]
    resolutions = Resolutions(answers)
    assert len(resolutions) == 3
    assert resolutions.all() == tuple(answers)
    first, cancelled = resolutions.for_(review)
    assert first.response == Review(approved=True)
    assert (cancelled.status, cancelled.response) == ("cancelled", None)
    assert [a.response for a in resolutions.for_(free)] == [{"approved": True}]
    assert resolutions.for_(define_interrupt("other")) == ()
    assert "review" in repr(resolutions)


def test_an_answer_that_does_not_fit_cannot_be_parsed() -> None:
    with pytest.raises(ValidationError):
        define_interrupt("review", response=Review).parse({"approved": "perhaps"})


def _once(value: object) -> int:
    """Takes text and makes a number of it; would not take the number again."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    return int(value)


Number: TypeAlias = Annotated[int, BeforeValidator(_once)]


def test_a_payload_is_parsed_once_and_shown_as_what_its_type_made_of_it() -> None:
    """A type that transforms is not applied to its own result: neither when the question is
    answered, nor when a browser repeats it."""
    definition = define_interrupt("count", payload=Number)
    asked = ask(definition, payload="5")
    assert asked.payload == 5
    with pytest.raises(InvalidValue, match="must be text"):
        ask(definition, payload=5)
    again = definition.repeat(key="k", reason="r", message="m", payload=5, expires_at=None)
    assert (again.payload, again.definition) == (5, definition)
    descriptor = generic_descriptor(asked, 0, "i1", "r1")
    binding = parse_binding(descriptor)
    assert binding is not None
    assert check_generic(binding, descriptor, {"count": definition}) is None
    drifted = {"count": define_interrupt("count", payload=str)}
    assert "have changed" in str(check_generic(binding, descriptor, drifted))


def test_what_is_repeated_must_fit_the_schema_all_the_same() -> None:
    definition = define_interrupt("count", payload=Number)
    with pytest.raises(InvalidValue, match=r"\$\.payload"):
        definition.repeat(key="k", reason="r", message="m", payload="5", expires_at=None)
