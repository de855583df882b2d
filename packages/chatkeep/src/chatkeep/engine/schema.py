"""JSON Schema: checking values, and making schemas from Python signatures."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

import jsonschema
import jsonschema.exceptions
import jsonschema.validators
import pydantic
import referencing.exceptions
from pydantic import BaseModel, ConfigDict, TypeAdapter
from referencing.jsonschema import EMPTY_REGISTRY
from typing_extensions import is_typeddict

from chatkeep.errors import ToolError

__all__ = ["Parameters", "Problem", "SchemaValidator", "output_schema_of", "parameters_of"]


_KEPT_SCHEMAS: Final = 256
_KEPT_TEXT: Final = 1 << 14
_LONGEST_MESSAGE: Final = 500
"""Messages quote the value that does not fit, which may be a megabyte."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a value: a message, and the keys and positions that lead to it.

    ``broken``: nothing can be said about the value, because the schema cannot be applied.
    """

    message: str
    path: tuple[str | int, ...] = ()
    place: str = ""
    broken: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"


class SchemaValidator:
    """A compiled JSON Schema. ``$schema`` picks the draft (2020-12 when absent); unknown formats
    and keywords are ignored; references outside the schema are never fetched.

    Small schemas that were checked are remembered: a check costs a millisecond, and browsers send
    the schemas of all their tools with every post.

    Raises:
        ToolError: the schema is no valid JSON Schema. ``what`` names it in the message.
    """

    __slots__ = ("_validator", "schema")

    def __init__(self, schema: Mapping[str, Any], what: str) -> None:
        self.schema = dict(schema)
        try:
            self._validator = _compiled(self.schema)
        except jsonschema.exceptions.SchemaError as error:
            reason = f"{error.json_path}: {error.message}"
        except RecursionError:
            reason = "it is nested too deeply"
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            # The checker trusts some keywords ($schema, $id) to be what they should be.
            reason = str(error)
        else:
            return
        raise ToolError(f"{what} is not a valid JSON Schema: {_short(reason)}")

    def issue(self, value: Any) -> str | None:
        """What is wrong with ``value``, in one line; None when it fits."""
        problem = self.problem(value)
        return None if problem is None else str(problem)

    def problem(self, value: Any) -> Problem | None:
        """What is wrong with ``value``, and where; None when it fits."""
        try:
            errors = list(self._validator.iter_errors(value))
        except referencing.exceptions.Unresolvable as error:
            reason = f"the schema refers to {error.ref!r}, which it does not contain"
            return Problem(_short(reason), broken=True)
        except RecursionError:
            return Problem("the value is nested too deeply")
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            # Integers beyond floats, references that are no text: the checker just breaks.
            reason = f"the value cannot be checked against the schema: {error}"
            return Problem(_short(reason), broken=True)
        if not errors:
            return None
        worst = min(errors, key=jsonschema.exceptions.relevance)
        place = worst.json_path.removeprefix("$").removeprefix(".")
        return Problem(_short(str(worst.message)), tuple(worst.absolute_path), _short(place))


def _compiled(schema: dict[str, Any]) -> Any:
    if not isinstance(schema.get("$schema", ""), str):
        raise TypeError("$schema must be text")
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError):  # a schema in Python may hold what is no JSON, as a default
        return _compile(schema)
    return _compiled_text(text) if len(text) <= _KEPT_TEXT else _compile(schema)


@functools.lru_cache(maxsize=_KEPT_SCHEMAS)
def _compiled_text(text: str) -> Any:
    return _compile(json.loads(text))


def _compile(schema: dict[str, Any]) -> Any:
    default = jsonschema.Draft202012Validator
    kind = jsonschema.validators.validator_for(schema, default=default)
    kind.check_schema(schema)
    return kind(schema, registry=EMPTY_REGISTRY)


def pydantic_issue(error: pydantic.ValidationError) -> str:
    """The first issue of a pydantic error, in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return _short(f"{place}: {first['msg']}" if place else first["msg"])


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """How JSON arguments become the arguments of a Python function."""

    schema: dict[str, Any]
    bind: Callable[[Any], dict[str, Any]]
    """JSON arguments to keyword arguments; raises ``pydantic.ValidationError``."""
    context: str | None
    """The parameter that takes the tool's context, if there is one."""


def _hints(function: Callable[..., Any], scope: Mapping[str, Any]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(target, localns=dict(scope), include_extras=True)
    except NameError as error:
        raise ToolError(
            f"tool {_name(function)}: a type hint cannot be resolved ({error}); define the type "
            "where the function is defined"
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def parameters_of(
    function: Callable[..., Any], context_type: type[Any], scope: Mapping[str, Any]
) -> Parameters:
    """Schema and binding of a function's parameters.

    A parameter annotated with ``context_type`` is left out of the schema. A function whose only
    other parameter is a pydantic model takes that model's fields as its arguments. Otherwise
    each parameter is a property; unknown ones are refused.

    Raises:
        ToolError: ``*args``, ``**kwargs`` or positional-only parameters, hints that cannot be
            resolved, types without a JSON Schema.
    """
    name = _name(function)
    hints = _hints(function, scope)
    context: str | None = None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"tool {name}: {parameter} cannot be described by a JSON Schema")
        hint = hints.get(parameter.name, Any)
        if hint is context_type:
            context = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hint, default)
    model, bind = _model(name, fields)
    try:
        schema = model.model_json_schema()
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise ToolError(f"tool {name}: no JSON Schema for its parameters: {error}") from error
    schema.pop("title", None)
    return Parameters(schema, bind, context)


def _model(
    name: str, fields: dict[str, Any]
) -> tuple[type[BaseModel], Callable[[Any], dict[str, Any]]]:
    if len(fields) == 1:
        ((only, (hint, _)),) = fields.items()
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            return hint, lambda args: {only: hint.model_validate(args)}
    # Fields are named apart from the parameters: BaseModel refuses some names (`schema`, `copy`,
    # `_x`) that are fine for a parameter.
    renamed: dict[str, Any] = {
        f"p{i}": (hint, pydantic.Field(default, alias=parameter))
        for i, (parameter, (hint, default)) in enumerate(fields.items())
    }
    try:
        model = pydantic.create_model(name, __config__=ConfigDict(extra="forbid"), **renamed)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise ToolError(f"tool {name}: its parameters cannot be modelled: {error}") from error
    names = list(fields)

    def bind(args: Any) -> dict[str, Any]:
        value = model.model_validate(args)
        return {parameter: getattr(value, f"p{i}") for i, parameter in enumerate(names)}

    return model, bind


def output_schema_of(
    function: Callable[..., Any], scope: Mapping[str, Any]
) -> dict[str, Any] | None:
    """JSON Schema of a structured return type (pydantic model, dataclass, TypedDict).

    Other return types give none: they say too little to reject a result for.
    """
    hint: Any = _hints(function, scope).get("return")
    if not _is_structured(hint):
        return None
    try:
        return TypeAdapter(hint).json_schema(mode="serialization")
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise ToolError(
            f"tool {_name(function)}: no JSON Schema for its return type: {error}"
        ) from error


def _is_structured(hint: Any) -> bool:
    if is_typeddict(hint) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return True
    return isinstance(hint, type) and issubclass(hint, BaseModel)
