"""JSON bodies into typed values; what is wrong becomes a 400 that names the field. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any, TypeVar

import msgspec

from paceline.errors import BadRequest

T = TypeVar("T")
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FIELD = re.compile(r"^Object (?P<what>missing required|contains unknown) field `(?P<name>[^`]*)`")


def json_object(data: bytes) -> dict[str, Any]:
    """Raises BadRequest when `data` is anything but one JSON object."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {_fault(data, error)}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object", code="invalid_json")
    return value


def _fault(data: bytes, error: Exception) -> str:
    """Half of a surrogate pair is cut-off data to msgspec; the standard library reads it."""
    if "truncated" in str(error) and _SURROGATE.search(data):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(data)
            return r"a text in it has half of a surrogate pair (\uD800 to \uDFFF)"
    return str(error)


def converted(value: Any, kind: type[T], prefix: str = "") -> T:
    """`value` as `kind`. Raises BadRequest, `param` being the path of what is wrong, under `prefix`."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error), prefix) from error


def _explained(text: str, prefix: str) -> BadRequest:
    """A validation fault as a BadRequest whose `param` is the path of the field."""
    at = _AT.search(text)
    path = (at["path"] if at else "").removeprefix(".")
    where = prefix + path if path.startswith("[") else ".".join(filter(None, (prefix, path)))
    fault = _AT.sub("", text)
    field = _FIELD.match(text)
    if field is None:
        code = "invalid_type" if "got" in fault else "invalid_value"
        return BadRequest(f"`{where}`: {fault}", param=where, code=code)
    param = ".".join(filter(None, (where, field["name"])))
    if field["what"] == "missing required":
        return BadRequest(f"`{param}` is missing", param=param, code="missing_required_parameter")
    return BadRequest(f"`{param}` is no parameter that is known here", param=param, code="unknown_parameter")
