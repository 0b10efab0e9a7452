"""What a JSON schema says of a value's type. Pure."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
REFERENCES_MAX = 8
"""References and alternatives that are followed, one within the other."""
TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def properties_of(schema: object) -> Mapping[str, Schema]:
    """The properties that the schema of an object names."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def resolved(schema: object, root: Schema) -> Schema:
    """The schema that ``schema`` refers to within ``root``, or itself."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, Mapping):
            return {}
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str) and reference.startswith("#/"):
            schema = root
            for name in reference[2:].split("/"):
                schema = schema.get(name) if isinstance(schema, Mapping) else None
        elif isinstance(parts, list) and len(parts) == 1 and "type" not in schema:
            schema = parts[0]
        else:
            return schema
    return {}


def types_of(schema: object, root: Schema, depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a value may have; None: any."""
    schema = resolved(schema, root)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(TYPES.get(type(value), "") for value in values)
    branches = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(branches, list) or depth == REFERENCES_MAX:
        return None
    found: set[str] = set()
    for branch in branches[:REFERENCES_MAX]:
        types = types_of(branch, root, depth + 1)
        if types is None:
            return None
        found |= types
    return frozenset(found) if len(branches) <= REFERENCES_MAX else None
