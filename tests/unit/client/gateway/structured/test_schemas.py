"""Schemas refer to themselves: their references stay what they are, and cost no more for it."""

import contextlib
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from client.gateway.errors import ApiError
from client.gateway.structured.call_formats import (
    CALL_FORMATS,
    FUNCTION_TAGS,
    KEYS_AND_VALUES,
    TAGGED_JSON,
)
from client.gateway.structured.calls import calls_in
from client.gateway.structured.calls_grammar import calls_grammar
from client.gateway.structured.grammar import of_schema
from client.gateway.structured.schemas import (
    SCHEMAS,
    ArgumentTypes,
    LostReference,
    SchemaDocument,
    TooManyPlaces,
)
from testing.paths import ROOT
from tests.examples import examples
from tests.unit.client.gateway.looked import Looked

MODEL = ROOT / "models" / "brook"
TOKENIZER = LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=2048, eos_token=1)


def follows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def an_object(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


ADDRESS = an_object({"street": {"type": "string"}, "zip": {"type": "integer"}})
REFERRING = {
    "definitions": (
        an_object({"x": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": ADDRESS}}),
        {"x": {"street": "s", "zip": 1}},
        {"x": {"zip": "1"}},
    ),
    "old definitions": (
        an_object({"x": {"$ref": "#/definitions/A"}}, definitions={"A": ADDRESS}),
        {"x": {"zip": 1}},
        {"x": {"zap": 1}},
    ),
    "itself": (
        an_object({"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        {"x": {"x": {"x": None}}},
        {"x": {"y": None}},
    ),
    "a place of another kind": (
        an_object({"x": {"type": "array", "items": {"$ref": "#/properties/y~1%25z"}},
                   "y/%z": ADDRESS}),
        {"x": [{"zip": 1}], "y/%z": {"zip": 2}},
        {"x": [{"zip": None}]},
    ),
    "a chain": (
        an_object({"x": {"$ref": "#/$defs/A"}},
                  **{"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/C"},
                               "C": ADDRESS}}),
        {"x": {"zip": 1}},
        {"x": {"zap": 1}},
    ),
    "an anchor": (
        an_object({"x": {"$ref": "#here"}}, **{"$defs": {"A": {"$anchor": "here", **ADDRESS}}}),
        {"x": {"zip": 1}},
        {"x": {"zap": 1}},
    ),
    "a name": (
        an_object({"x": {"$ref": "address.json"}},
                  **{"$id": "https://a.example/all.json",
                     "$defs": {"A": {"$id": "address.json", **ADDRESS}}}),
        {"x": {"zip": 1}},
        {"x": {"zap": 1}},
    ),
    "a document within": (
        an_object({"x": {"$id": "urn:inner", "$defs": {"A": ADDRESS},
                         **an_object({"y": {"$ref": "#/$defs/A"}})}},
                  **{"$defs": {"A": {"type": "string"}}}),
        {"x": {"y": {"zip": 1}}},
        {"x": {"y": "zip"}},
    ),
    "a part of a document within": (
        an_object({"x": {"$ref": "urn:inner#/$defs/A"}},
                  **{"$defs": {"A": {"type": "string"},
                               "I": {"$id": "urn:inner",
                                     "$defs": {"A": an_object({"y": {"$ref": "#/$defs/B"}}),
                                               "B": {"type": "integer"}}}}}),
        {"x": {"y": 1}},
        {"x": {"y": "1"}},
    ),
    "no reference, but the word": (
        an_object({"$ref": {"type": "integer"}, "x": {"enum": [{"$ref": "#/none"}]}}),
        {"$ref": 1, "x": {"$ref": "#/none"}},
        {"$ref": [1]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERRING)
def test_references_mean_the_same_wherever_the_schema_is_embedded(name: str) -> None:
    schema, good, bad = REFERRING[name]
    jsonschema.Draft202012Validator(schema).validate(good)
    assert follows(f"start: {of_schema(schema)}", json.dumps(good))
    assert not follows(f"start: {of_schema(schema)}", json.dumps(bad))
    functions = [{"name": each, "parameters": schema} for each in ("f", "g")]
    options: Any = {"required": True, "parallel": True, "marks": {}}
    grammar = calls_grammar(TAGGED_JSON, functions, **options)
    for arguments, fits in ((good, True), (bad, False)):
        call = json.dumps({"name": "g", "arguments": arguments})
        assert follows(grammar, f"<tool_call>\n{call}\n</tool_call>") is fits
    grammar = calls_grammar(FUNCTION_TAGS, functions, **options)
    for arguments, fits in ((good, True), (bad, False)):
        inside = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        text = f"<tool_call>\n<function=g>\n{inside}</function>\n</tool_call>"
        assert follows(grammar, text) is fits


@pytest.mark.parametrize("reference", ["#/$defs/B", "#b", "b.json", "http://[", "#/$defs/A/type"])
def test_a_reference_that_leads_nowhere_is_the_callers_mistake(reference: str) -> None:
    schema = an_object({"x": {"$ref": reference}}, **{"$defs": {"A": {"type": "string"}}})
    with pytest.raises(LostReference):
        SchemaDocument(schema, 100).alone()
    with pytest.raises(ApiError) as refused:
        of_schema(schema)
    assert refused.value.status == 400
    for form in CALL_FORMATS:
        with pytest.raises(ApiError) as refused:
            calls_grammar(
                form, [{"name": "f", "parameters": schema}], required=True, parallel=True, marks={}
            )
        assert refused.value.status == 400


def branching(levels: int, branches: int, leaf: Any) -> dict[str, Any]:
    """A schema of a few hundred bytes with ``branches ** levels`` ways from its top to its leaf."""
    defs: dict[str, Any] = {
        f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * branches} for at in range(levels)
    }
    return an_object({"x": {"$ref": "#/$defs/a0"}}, **{"$defs": {**defs, f"a{levels}": leaf}})


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.title)
@pytest.mark.parametrize("leaf", [{"const": 1}, {"type": "string"}, {"type": "array"}])
def test_a_grammar_grows_with_a_schema_and_not_with_the_ways_through_it(
    form: Any, leaf: Any
) -> None:
    sizes = []
    for levels in (10, 20, 40):
        functions = [{"name": "f", "parameters": branching(levels, 2, leaf)}]
        grammar = calls_grammar(form, functions, required=True, parallel=True, marks={})
        sizes.append(len(grammar))
    assert sizes[2] <= 4 * sizes[0]


def test_what_is_required_is_not_searched_for_each_property() -> None:
    """120,000 required names of a schema with 600 properties took 1.7 s."""

    names = [f"x{at}" for at in range(100)]
    schema = an_object({name: {"type": "integer"} for name in names})
    asked = [Looked(name) for name in (*names[:50], *[""] * 100)]
    functions = [{"name": "f", "parameters": {**schema, "required": asked}}]
    before = Looked.looks
    calls_grammar(FUNCTION_TAGS, functions, required=True, parallel=True, marks={})
    assert Looked.looks - before < 300


def test_an_answers_values_are_read_by_looking_at_each_place_once() -> None:
    schema = branching(60, 8, {"type": "integer"})
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    (call,) = calls_in(text, FUNCTION_TAGS, {"f": schema}, is_whole=True)
    assert call.arguments == '{"x": 1}'
    wide = {"anyOf": [{"type": "integer"}] * 1000}
    assert ArgumentTypes({"f": an_object({"x": wide})}).of("f", "x") is None


@pytest.mark.parametrize(
    "schema",
    [
        an_object({f"x{at}": {"$ref": "#/$defs/A"} for at in range(300)},
                  **{"$defs": {"A": an_object({f"y{at}": {"type": "integer"}
                                               for at in range(300)})}}),
        an_object({"x": {"enum": [f"value {at}" for at in range(9000)]}}),
        an_object({"x": {"anyOf": [{"const": f"value {at}"} for at in range(9000)]}}),
        an_object({f"property {at}": {"type": "string"} for at in range(4000)}),
    ],
)  # fmt: skip
def test_a_grammar_that_would_be_too_large_is_refused_while_it_is_built(schema: Any) -> None:
    functions = [{"name": "f", "parameters": schema}]
    with pytest.raises(ApiError) as refused:
        calls_grammar(KEYS_AND_VALUES, functions, required=True, parallel=True, marks={})
    assert refused.value.status == 400


def within(levels: int, inner: Any, **more: Any) -> Any:
    """A schema deep in others, each with ``more`` keywords."""
    for _ in range(levels):
        inner = {**more, "items": inner}
    return inner


REFERENCES = {"prefixItems": [{"$ref": "#"}] * 400}


@pytest.mark.parametrize(
    "schema",
    [
        within(100, REFERENCES, **{"$id": "x/"}),
        {"$id": "http://h/" + "a" * 100_000, "$ref": "#b",
         "anyOf": [{"$id": f"{at}"} for at in range(400)]},
        {"$id": "http://h/" + "a" * 100_000, "$ref": "#b",
         "anyOf": [{"$anchor": f"{at}"} for at in range(400)]},
        {"prefixItems": [within(300, {"$ref": "#"})] * 20},
    ],
    ids=["URIs that grow", "a long URI", "anchors within a long URI", "deep places"],
)  # fmt: skip
def test_a_look_at_a_deep_place_or_a_long_uri_counts_as_several(schema: Any) -> None:
    """Each takes a walk from the root, and a copy of the URI: 256 KiB took a minute, and 1 GB."""
    with pytest.raises(TooManyPlaces):
        SchemaDocument(schema, 1 << 14).alone()
    with pytest.raises(ApiError) as refused:
        of_schema(schema)
    assert refused.value.status == 400


def test_an_answer_has_a_bounded_number_of_arguments_looked_up() -> None:
    types = ArgumentTypes({"f": an_object({"x": {"type": "string"}})})
    for at in range(SCHEMAS.arguments_max):
        types.of("f", f"y{at}")
    assert types.of("f", "x") is None
    assert types.of("f", "y0") is None
    assert len(types._known) == SCHEMAS.arguments_max


def test_circles_end() -> None:
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    schema = an_object({"x": {"$ref": "#/$defs/a"}}, **circle)
    assert ArgumentTypes({"f": schema}).of("f", "x") is None
    of_schema(schema)
    for at in range(3):
        with pytest.raises(TooManyPlaces):
            SchemaDocument(branching(9, 2, {}), at).leaves(("properties", "x"))


KEYWORDS = (
    "$ref", "$id", "$anchor", "$defs", "definitions", "type", "properties", "items", "anyOf",
    "oneOf", "allOf", "enum", "const", "required", "minLength", "maxLength", "pattern", "x", "not",
    "additionalProperties", "prefixItems", "x-guidance", "title",
)  # fmt: skip
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        (
            "string",
            "object",
            "integer",
            "#",
            "#/$defs/x",
            "#x",
            "x",
            "#/properties/x",
            "~1",
            "\ud800",
        )
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("form", [KEYS_AND_VALUES, TAGGED_JSON], ids=lambda form: form.title)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), ANY_JSON, max_size=6))
@examples(100)
def test_any_schema_is_written_or_the_callers_mistake(form: Any, schema: dict[str, Any]) -> None:
    functions = [{"name": "f", "parameters": schema}]
    with contextlib.suppress(ApiError):
        calls_grammar(form, functions, required=False, parallel=True, marks={})
    with contextlib.suppress(ApiError):
        of_schema(schema)
    ArgumentTypes({"f": schema}).of("f", "x")
