"""What is wrong with the body of a request, by the structure that it should have. Pure."""

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.inspect import (
    DictType,
    ListType,
    LiteralType,
    Metadata,
    StructType,
    Type,
    UnionType,
    type_info,
)

from client.gateway.errors import ApiError, bad_request

_INVALID = re.compile("Invalid (?:enum )?value '(.*)'", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[")


def mistake(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> ApiError:
    """The answer (400) to a body that is no request of this ``kind``: it names the field at fault,
    and for a value that is not known those that are."""
    said, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    param = path.lstrip(".") or None
    if param is None and said.startswith("Object missing required field"):
        param = said.split("`")[1]
    if (invalid := _INVALID.fullmatch(said)) and (known := _known(type_info(kind), path)):
        said = f"{invalid[1][:80]!r} is not supported here; {', '.join(known)} may be"
    return bad_request(f"{param or 'the body'}: {said}", param)


def _known(whole: Type, path: str) -> Sequence[str]:
    """The texts that a field takes, sorted; empty: any."""
    found = [whole]
    names = [step[1] for step in _STEP.finditer(path)]
    for at, name in enumerate(names):
        opened = [each for outer in found for each in members(outer)]
        structs = [each for each in opened if isinstance(each, StructType)]
        tags = {repr(each.tag) for each in structs if name and each.tag_field == name}
        if tags and at == len(names) - 1:
            return sorted(tags)
        if name is not None:
            fields = [field for each in structs for field in each.fields]
            found = [field.type for field in fields if field.encode_name == name]
        else:
            found = [each.item_type for each in opened if isinstance(each, ListType)]
            found += [each.value_type for each in opened if isinstance(each, DictType)]
    texts = [each for outer in found for each in members(outer) if isinstance(each, LiteralType)]
    return sorted({repr(value) for each in texts for value in each.values if value})


def members(kind: Type) -> Iterator[Type]:
    """The types that a value of ``kind`` may have."""
    if isinstance(kind, Metadata):
        yield from members(kind.type)
    elif isinstance(kind, UnionType):
        for each in kind.types:
            yield from members(each)
    else:
        yield kind
