"""Answers by random JSON schemas: does each validate, and what do plain answers become beside them?

``python -m bench speed.schemas --out bench/results/schemas.json`` asks a gateway before real peers
of the bundled model (a story teller, which knows no JSON) for an answer by each of 500 schemas,
drawn from ``--seed``, greedy and sampled by turns. `jsonschema` judges what ends by itself; an
answer that reaches its most tokens is cut, and counted as such. Every tenth question is a plain
one, whose greedy text has to be transformers' own.

Schemas nest objects, arrays, tuples, enumerations, alternatives, bounded numbers, strings by
length, pattern and format, references and recursion. Each string has an end, as a story would go on
in it, and who may go on for ever (a tree) is sampled. `jsonschema` judges no times.
"""

import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import jsonschema
import openai
from rich.console import Console

from bench import report
from testing.local_swarm import GatewayProcess, LocalSwarm
from testing.paths import ROOT
from testing.reference import Reference, memory_for

MODEL = ROOT / "models" / "brook"
PROMPT = "Once upon a time there was"
TOKENS_MAX = 900
PLAIN_TOKENS = 60
PLAIN_EVERY = 10
AT_ONCE = 4
SPANS = ("0:4", "4:8")
"""Layers of the two peers, each of which lends what the whole model needs: there is room for KV."""

Schema = dict[str, Any]

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{4}$", "^(red|green|blue)( light)?$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid")
NAMES = ("name", "age", "kind", "items", "größe", "a b", 'quo"ted', "x/y", "id", "nested", "tags")


class Schemas:
    """Draws schemas, the same ones from the same seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def draw(self, number: int) -> Schema:
        """An object's schema, some with definitions that refer to themselves.

        Three of four ask for no white space, of which brook is fond, and may nest deep.
        """
        if number % 4 == 0:
            return self._object(0)
        schema = COMPACT | self._object(3)
        if self._chance.random() < 0.2:
            leaf = self._scalar()
            schema["$defs"] = {
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": leaf,
                        "children": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/tree"},
                            "maxItems": 2,
                        },
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                }
            }
            schema["properties"]["tree"] = {"$ref": "#/$defs/tree"}
            schema["required"] = [*schema["required"], "tree"]
        return schema

    def _any(self, depth: int) -> Schema:
        ways = [self._scalar, self._scalar, self._scalar]
        if depth > 0:
            ways += [lambda: self._object(depth - 1), lambda: self._array(depth - 1)]
            ways += [lambda: self._alternatives(depth - 1)]
        return self._chance.choice(ways)()

    def _object(self, depth: int) -> Schema:
        names = self._chance.sample(NAMES, self._chance.randint(1, 4))
        required = [name for name in names if self._chance.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        if self._chance.random() < 0.2:
            fixed = [self._any(depth) for _ in range(self._chance.randint(1, 3))]
            return {
                "type": "array",
                "prefixItems": fixed,
                "items": False,
                "minItems": len(fixed),
            }
        least = self._chance.randint(0, 2)
        most = least + self._chance.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": most}

    def _alternatives(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._chance.randint(2, 3))]}

    def _scalar(self) -> Schema:
        return self._chance.choice(
            (self._string, self._string, self._number, self._choice, self._nullable)
        )()

    def _string(self) -> Schema:
        least = self._chance.randint(0, 5)
        return self._chance.choice(
            (
                {"type": "string", "minLength": least, "maxLength": least + 20},
                {"type": "string", "pattern": self._chance.choice(PATTERNS)},
                {"type": "string", "format": self._chance.choice(FORMATS)},
            )
        )

    def _number(self) -> Schema:
        least = self._chance.randint(-1000, 1000)
        most = least + self._chance.randint(1, 500)
        return self._chance.choice(
            (
                {"type": "integer", "minimum": least, "maximum": most},
                {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": most + 1},
                {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 5},
                {"type": "number", "minimum": least / 4, "maximum": most / 4},
                {"type": "boolean"},
            )
        )

    def _choice(self) -> Schema:
        given: list[Any] = self._chance.sample(["a", "ü", 1, 2.5, None, True, "two words", ""], 3)
        return {"enum": given} if self._chance.random() < 0.8 else {"const": given[0]}

    def _nullable(self) -> Schema:
        return {"type": ["integer", "null"], "minimum": 0, "maximum": self._chance.randint(1, 99)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of one schema. ``kind`` is "valid", "invalid", "cut" or "refused"."""

    kind: str
    seconds: float
    tokens: int = 0
    why: str = ""
    schema: Schema | None = None
    """Of what did not validate or was refused."""


JUDGE = jsonschema.Draft202012Validator
FORMATS_KNOWN = JUDGE.FORMAT_CHECKER


@FORMATS_KNOWN.checks("date", raises=ValueError)
def is_date(text: object) -> bool:
    """By RFC 3339, which has a year 0000; Python has none, and 2000 is as long."""
    if isinstance(text, str):
        date.fromisoformat(f"2000{text[4:]}" if text.startswith("0000") else text)
    return True


def judge(client: openai.OpenAI, schema: Schema, number: int) -> Judged:
    """Ask for an answer by ``schema`` and hold it against that."""
    began_s = time.monotonic()
    try:
        answer = client.completions.create(
            model=MODEL.name,
            prompt=PROMPT,
            max_tokens=TOKENS_MAX,
            temperature=1 if "tree" in schema["properties"] else number % 2,
            seed=number,
            extra_body={"guided_json": schema},
        )
    except openai.APIStatusError as error:
        seconds = time.monotonic() - began_s
        return Judged(kind="refused", seconds=seconds, why=error.message, schema=schema)
    seconds = time.monotonic() - began_s
    choice = answer.choices[0]
    tokens = answer.usage.completion_tokens if answer.usage else 0
    if choice.finish_reason == "length":
        return Judged(kind="cut", seconds=seconds, tokens=tokens, why=choice.text[-200:])
    try:
        JUDGE(schema, format_checker=FORMATS_KNOWN).validate(json.loads(choice.text))
    except (ValueError, jsonschema.ValidationError) as error:
        why = f"{str(error)[:300]}: {choice.text[:300]}"
        return Judged(kind="invalid", seconds=seconds, tokens=tokens, why=why, schema=schema)
    return Judged(kind="valid", seconds=seconds, tokens=tokens)


def plain_text(client: openai.OpenAI) -> str:
    """A greedy answer without a grammar."""
    answer = client.completions.create(
        model=MODEL.name, prompt=PROMPT, max_tokens=PLAIN_TOKENS, temperature=0
    )
    return answer.choices[0].text


def expected_text() -> str:
    """The same answer by transformers."""
    reference = Reference.load(MODEL, threads=1)
    ids, _ = reference.greedy(reference.encode(PROMPT), PLAIN_TOKENS)
    return reference.decode(ids)


def ask_all(url: str, schemas: list[Schema]) -> tuple[list[Judged], list[str]]:
    """Every schema's outcome, and the plain answers between them."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
    plain: list[str] = []

    def one(number: int) -> Judged:
        if number % PLAIN_EVERY == 0:
            plain.append(plain_text(client))
        return judge(client, schemas[number], number)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(len(schemas)))), plain


def main() -> int:
    parser = report.parser_of("bench.speed.schemas", __doc__)
    parser.add_argument("--schemas", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    drawing = Schemas(arguments.seed)
    schemas = [drawing.draw(number) for number in range(arguments.schemas)]
    whole_gib = memory_for(MODEL) / 2**30
    with LocalSwarm(MODEL, extra=("--threads", "1")) as swarm:
        for span in SPANS:
            swarm.start_peer(memory_gib=whole_gib, extra=("--layers", span))
        swarm.wait_serving()
        gateway = GatewayProcess(swarm.addresses, MODEL)
        try:
            judged, plain = ask_all(gateway.url, schemas)
        finally:
            gateway.stop()
    kinds = Counter(each.kind for each in judged)
    expected = expected_text()
    seconds = sorted(each.seconds for each in judged)
    result = report.provenance(arguments.seed) | {
        "schemas": len(schemas),
        **{kind: kinds[kind] for kind in ("valid", "invalid", "cut", "refused")},
        "plain_answers": len(plain),
        "plain_that_differ": sum(text != expected for text in plain),
        "median_s": round(seconds[len(seconds) // 2], 2),
        "tokens": sum(each.tokens for each in judged),
        "not_valid": [asdict(each) for each in judged if each.kind != "valid"],
    }
    report.write(arguments.out, result)
    Console().print_json(data={k: v for k, v in result.items() if k != "not_valid"})
    for each in judged:
        if each.kind != "valid":
            print(f"{each.kind}: {each.why}")
    return 0 if kinds["valid"] == len(schemas) and not result["plain_that_differ"] else 1


if __name__ == "__main__":
    sys.exit(main())
