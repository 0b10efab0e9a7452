"""schemathesis over the gateway's own document: whatever is sent, nothing is a fault of ours."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given

from client.gateway.web.app import ENDPOINTS, GatewayConfig
from client.gateway.web.openapi import document
from client.gateway.web.uploads import UploadsConfig
from tests.examples import examples
from tests.unit.client.gateway.beside import gateway_beside

CASES = [
    (method, path, mode)
    for path, methods in document((each for each, _ in ENDPOINTS), with_keys=False)["paths"].items()
    for method, operation in methods.items()
    for mode in ("positive", "negative")
    if mode == "positive" or "requestBody" in operation  # else nothing can be wrong
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway on a loop of its own, as schemathesis waits for its answers."""
    import schemathesis.specs.openapi.schemas  # noqa: F401 - before a second thread runs

    with gateway_beside(config=GatewayConfig(uploads=UploadsConfig(time_s=5.0))) as gateway:
        yield gateway.url


@pytest.mark.property
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_nothing_is_a_server_error_and_everything_is_as_documented(
    url: str, method: str, path: str, mode: str
) -> None:
    import schemathesis  # seconds of imports
    from schemathesis.checks import CHECKS, load_all_checks

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema[path][method]
    load_all_checks()
    named = ["not_a_server_error", "status_code_conformance", "content_type_conformance"]
    checks = [CHECKS.get_one(name) for name in (*named, "response_schema_conformance")]
    session = requests.Session()

    @examples(
        15 if method == "post" else 5,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def run(case: Any) -> None:
        case.call_and_validate(checks=checks, session=session, timeout=60)

    run()
