"""The bytes of a body as a JSON value, or a refusal."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import orjson

from chatkeep.codec import MAX_DEPTH
from chatkeep.errors import BadRequest

__all__ = ["decode_body"]

_LONG_NUMBER = re.compile(rb"\d{19}")


def decode_body(body: bytes) -> Any:
    """The value of a request body: strict UTF-8, strict JSON, integers of any size.

    Lone surrogates in escapes are let through, as browsers send them; the codec replaces them
    where they are text and ids that hold one are refused.

    Raises:
        BadRequest: says what is wrong with the bytes.
    """
    # orjson turns integers beyond 64 bits into floats and refuses lone surrogates; the slow
    # reader does neither, so it has the last word.
    if not _LONG_NUMBER.search(body):
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest("$", f"the body is not UTF-8 (byte {error.start})") from None
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise BadRequest("$", f"nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            "$", f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except ValueError as error:  # an integer with too many digits
        raise BadRequest("$", str(error)) from None


def _refuse(name: str) -> NoReturn:
    raise BadRequest("$", f"{name} is not JSON")
