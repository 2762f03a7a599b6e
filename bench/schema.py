"""Whether JSON has a schema: an object that maps names to types, all of them needed, no others allowed.

A type is exact (1 is no float, True no integer), a tuple of types stands for any of them, Free for an object with names
of its own, a dict for an object with these names. Numbers must be finite and texts not empty.
"""

import math
from typing import Any, NamedTuple


class Free(NamedTuple):
    """An object with names of its own and values of these types."""

    values: tuple[type, ...]


def problem(schema: Any, value: Any, path: str = "") -> str | None:
    """The first place where a value has another form, with what is needed there, or None."""
    name = path.removesuffix(".") or "the record"
    if isinstance(schema, dict | Free) and not isinstance(value, dict):
        return f"{name}: an object is needed, not {type(value).__name__}"
    if isinstance(schema, dict):
        for key in [*schema, *value]:
            if key not in value or key not in schema:
                return f"{path}{key}: {'missing' if key not in value else 'unknown'} field"
        inner = ((schema[key], value[key], f"{path}{key}.") for key in schema)
    elif isinstance(schema, Free):
        inner = ((schema.values, part, f"{path}{key}.") for key, part in value.items())
    else:
        return _leaf(schema if isinstance(schema, tuple) else (schema,), value, name)
    return next((found for part in inner if (found := problem(*part))), None)


def _leaf(types: tuple[type, ...], value: Any, name: str) -> str | None:
    if type(value) not in types:
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        return f"{name}: {wanted} is needed, not {type(value).__name__}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name}: it must be finite"
    return f"{name}: it is empty" if value == "" else None
