"""Origins that an owner lets call: as people write them, as browsers send them."""

import pytest

from client.gateway.web.callers import is_allowed, origin_of
from dht.errors import UserError


@pytest.mark.parametrize(
    ("said", "sent", "allowed"),
    [
        ("https://chat.example.org", "https://chat.example.org", True),
        ("https://chat.example.org/", "https://chat.example.org", True),
        ("https://Chat.Example.org", "https://chat.example.org", True),
        ("https://chat.example.org:443", "https://chat.example.org", True),
        ("http://localhost:3000", "http://localhost:3000", True),
        ("http://localhost:*", "http://localhost:3000", True),
        ("http://[::1]:3000", "http://[::1]:3000", True),
        ("https://*.example.org", "https://chat.example.org", True),
        ("chrome-extension://*", "chrome-extension://bpoadfkcbjbfhfod", True),
        ("safari-web-extension://*", "safari-web-extension://E0F0C9BE-1A2B", True),
        ("*", "null", True),
        ("https://chat.example.org", "http://chat.example.org", False),
        ("https://chat.example.org", "https://chat.example.org.evil.example", False),
        ("https://*.example.org", "https://example.org", False),
        ("https://*.example.org", "https://evil.example/.example.org", False),
        ("https://a*a.example", "https://a.example", False),
        ("chrome-extension://*", "moz-extension://bpoadfkcbjbfhfod", False),
    ],
)
def test_an_origin_is_known_however_its_owner_wrote_it(said: str, sent: str, allowed: bool) -> None:
    assert is_allowed(sent, (origin_of(said),)) is allowed


@pytest.mark.parametrize(
    "said",
    ["chat.example.org", "https://a.example/chat", "null", "http://[", "https://*.*.org", "/"],
)
def test_what_no_browser_sends_is_refused(said: str) -> None:
    with pytest.raises(UserError, match="--allow-origin is"):
        origin_of(said)
