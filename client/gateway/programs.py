"""What people paste into programs so that these ask a gateway. Pure."""

from collections.abc import Callable, Mapping

NO_KEY = "none"
"""Programs want a key even where none is asked for."""
YOUR_KEY = "YOUR-KEY"
ALIASES = ("OPUS", "SONNET", "HAIKU")
"""What Claude Code calls models for its subagents, its plans and its small tasks."""


def settings(url: str, model: str, *, with_keys: bool) -> str:
    """The three lines that most programs need; ``url`` ends in ``/v1``."""
    key = "one of those that this gateway asks for" if with_keys else f"{NO_KEY} (any is taken)"
    return f"  base URL  {url}\n  model     {model}\n  key       {key}"


def _claude_code(url: str, model: str, key: str) -> str:
    return "\n".join(
        (
            f"export ANTHROPIC_BASE_URL={url.removesuffix('/v1')}",
            f"export ANTHROPIC_AUTH_TOKEN={key}",
            f"export ANTHROPIC_MODEL={model}",
            *(f"export ANTHROPIC_DEFAULT_{alias}_MODEL={model}" for alias in ALIASES),
            "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
            "claude",
        )
    )


def _codex(url: str, model: str, key: str) -> str:
    return "\n".join(
        (
            "# ~/.codex/config.toml",
            f'model = "{model}"',
            'model_provider = "anabranch"',
            "[model_providers.anabranch]",
            'name = "anabranch"',
            f'base_url = "{url}"',
            'wire_api = "responses"',
            *([] if key == NO_KEY else ['env_key = "ANABRANCH_API_KEY"']),
        )
    )


PROGRAMS: Mapping[str, Callable[[str, str, str], str]] = {
    "claude-code": _claude_code,
    "codex": _codex,
}


def settings_for(program: str, url: str, model: str, *, with_keys: bool) -> str:
    """What one of the ``PROGRAMS`` needs, to be pasted into a shell or a file."""
    return PROGRAMS[program](url, model, YOUR_KEY if with_keys else NO_KEY)
