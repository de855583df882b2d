"""The schema that a structured answer must fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, cast

import pydantic
from pydantic import TypeAdapter

from chatkeep.engine.schema import SchemaValidator, pydantic_issue
from chatkeep.errors import CompositionError, ToolError
from chatkeep.messages.parts import is_list, is_row

__all__ = ["OutputSchema"]

_BRANCHES: Final = ("anyOf", "oneOf")


class OutputSchema:
    """A JSON Schema, and the Python type that it was made of, if it was.

    Raises:
        CompositionError: no valid JSON Schema.
    """

    __slots__ = ("_type", "_validator", "schema")

    def __init__(self, schema: Mapping[str, Any], kind: TypeAdapter[Any] | None = None) -> None:
        self.schema = dict(schema)
        self._type = kind
        try:
            self._validator = SchemaValidator(self.schema, "output_schema")
        except ToolError as error:
            raise CompositionError(str(error)) from error

    @classmethod
    def of(cls, value: Any) -> Self:
        """Of a JSON Schema, or of a type that pydantic can describe (a model, a dataclass, a
        TypedDict, ``list[Item]``).

        Raises:
            CompositionError: it is neither.
        """
        if isinstance(value, Mapping):
            return cls(cast("Mapping[str, Any]", value))
        try:
            kind: TypeAdapter[Any] = TypeAdapter(value)
            schema = kind.json_schema()
        except Exception as error:
            raise CompositionError(
                f"output_schema={value!r} is neither a JSON Schema nor a type that has one: {error}"
            ) from error
        return cls(schema, kind)

    def issue(self, value: Any) -> str | None:
        """What is wrong with ``value``, in one line; None when it fits."""
        found = self._validator.issue(value)
        if found is None and self._type is not None:
            try:
                self._type.validate_python(value)
            except pydantic.ValidationError as error:
                return pydantic_issue(error)
        return found

    def narrowed(self, value: Any) -> Any:
        """``value`` without the nulls that a provider demands for optional fields: some take a
        schema only when every field is required, and write null for what is absent. A null that
        the schema allows stays."""
        return self._narrowed(value, self.schema, 0)

    def _narrowed(self, value: Any, schema: object, depth: int) -> Any:
        if depth > 100 or not (is_row(value) or is_list(value)):
            return value
        schema = self._resolved(schema)
        if schema is None:
            return value
        for part in cast("Sequence[object]", schema.get("allOf") or ()):
            value = self._narrowed(value, part, depth + 1)
        shaped = [
            branch
            for key in _BRANCHES
            for branch in cast("Sequence[object]", schema.get(key) or ())
            if not self._only_null(branch)
        ]
        if len(shaped) == 1:  # one of several shapes cannot be told from here
            value = self._narrowed(value, shaped[0], depth + 1)
        if is_list(value):
            items = schema.get("items")
            return [self._narrowed(item, items, depth + 1) for item in value]
        properties = schema.get("properties")
        if not is_row(value) or not is_row(properties):
            return value
        required = cast("Sequence[str]", schema.get("required") or ())
        return {
            key: self._narrowed(inner, properties.get(key), depth + 1)
            for key, inner in value.items()
            if inner is not None
            or key not in properties
            or key in required
            or self._allows_null(properties[key], depth)
        }

    def _resolved(self, schema: object) -> dict[str, Any] | None:
        """``schema``, or what it refers to inside the whole one."""
        for _ in range(10):
            if not is_row(schema):
                return None
            target = schema.get("$ref")
            if not isinstance(target, str) or not target.startswith("#"):
                return schema
            schema = self.schema
            for step in target.removeprefix("#").split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if is_row(schema) else None
        return None

    def _only_null(self, schema: object) -> bool:
        found = self._resolved(schema)
        return found is not None and found.get("type") == "null"

    def _allows_null(self, schema: object, depth: int) -> bool:
        found = self._resolved(schema)
        if found is None or depth > 100:
            return schema is not False
        kind = found.get("type")
        if kind is not None and kind != "null" and not (is_list(kind) and "null" in kind):
            return False
        if "enum" in found and None not in cast("Sequence[object]", found["enum"]):
            return False
        if "const" in found and found["const"] is not None:
            return False
        return all(
            any(self._allows_null(branch, depth + 1) for branch in cast("list[object]", found[key]))
            for key in _BRANCHES
            if is_list(found.get(key))
        )
