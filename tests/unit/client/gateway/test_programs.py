"""What people paste into programs is what docs/agents.md says."""

import tomllib

import pytest

from client.gateway.programs import PROGRAMS, settings, settings_for
from testing.paths import ROOT

URL = "http://127.0.0.1:8000/v1"
DOCS = (ROOT / "docs" / "agents.md").read_text()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_docs_have_what_is_printed(program: str) -> None:
    assert f"\n{settings_for(program, URL, 'brook', with_keys=False)}\n```" in DOCS
    assert f"\n{settings(URL, 'brook', with_keys=False)}\n```" in DOCS


def test_codex_reads_its_lines_and_keys_are_asked_for() -> None:
    told = settings_for("codex", URL, "org/model", with_keys=True)
    provider = tomllib.loads(told)["model_providers"]["anabranch"]
    assert (provider["base_url"], provider["env_key"]) == (URL, "ANABRANCH_API_KEY")
    told = settings_for("claude-code", URL, "org/model", with_keys=True)
    assert "ANTHROPIC_AUTH_TOKEN=YOUR-KEY" in told
    assert "asks for" in settings(URL, "org/model", with_keys=True)


def test_whatever_model_claude_code_asks_for_is_the_one_served() -> None:
    told = settings_for("claude-code", URL, "org/model", with_keys=False)
    said = dict(line.removeprefix("export ").split("=", 1) for line in told.splitlines()[:-1])
    models = {name: said[name] for name in said if name.endswith("_MODEL")}
    assert set(models.values()) == {"org/model"}
    assert {f"ANTHROPIC_DEFAULT_{each}_MODEL" for each in ("OPUS", "SONNET", "HAIKU")} < {*models}
