"""Empty objects that were sent as ``[]``: some languages have one empty value for both. Pure."""

import re
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import AnyType, DictType, ListType, StructType, Type, type_info

from client.gateway.protocols.mistakes import members
from client.gateway.structured.schemas import with_empty_objects

_EMPTY_LIST = re.compile(rb"(?:\A|:)\s*\[\s*\]")


@cache
def _kinds(kind: type[msgspec.Struct]) -> dict[str, Type]:
    """The types of a request's fields."""
    whole = type_info(kind)
    assert isinstance(whole, StructType)  # noqa: S101  a request is one
    return {field.encode_name: field.type for field in whole.fields}


def mended_fields(given: dict[str, bytes], kind: type[msgspec.Struct]) -> dict[str, bytes]:
    """Those fields of a request, as they were sent, in which ``[]`` stands for an object: with
    ``{}`` in its place."""
    found = {}
    for name, raw in given.items():
        if name in _kinds(kind) and _EMPTY_LIST.search(raw):
            value = msgspec.json.decode(raw)
            mended = with_objects(value, _kinds(kind)[name])
            if mended != value:
                found[name] = msgspec.json.encode(mended)
    return found


def with_objects(value: Any, kind: Type) -> Any:
    """``value`` with ``{}`` for each ``[]`` where ``kind`` has an object and no list. An object of
    any values is a JSON schema wherever a request has one, and is read as that."""
    kinds = list(members(kind))
    of_items = next((each.item_type for each in kinds if isinstance(each, ListType)), None)
    objects = [each for each in kinds if isinstance(each, StructType | DictType)]
    if isinstance(value, list) and of_items is not None:
        return [with_objects(each, of_items) for each in value]
    if not objects or not isinstance(value, dict):
        return {} if value == [] and objects else value
    match objects[0]:
        case StructType(fields=fields):
            known = {field.encode_name: field.type for field in fields}
            return {
                name: with_objects(each, known[name]) if name in known else each
                for name, each in value.items()
            }
        case DictType(value_type=AnyType()):
            return with_empty_objects(value)
        case _:
            return value
