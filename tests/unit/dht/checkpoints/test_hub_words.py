"""What is said of a model that is neither here nor looked up on the hub."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from dht.checkpoints import hub
from dht.checkpoints.hub import (
    HubId,
    HubOfflineError,
    HubUnreachableError,
    list_model,
    typed_model,
)
from dht.errors import AnabranchError, UserError


@pytest.mark.parametrize("error", [HubUnreachableError, HubOfflineError])
def test_a_mistyped_directory_is_said_to_be_none(
    error: type[AnabranchError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(hub_id: HubId) -> None:
        raise error(f"{hub_id} was not looked up")

    monkeypatch.setattr(hub, "_ask", ask)
    monkeypatch.setattr(hub, "notes_directory", lambda: tmp_path / "notes")
    monkeypatch.setattr(hub, "_cached_listing", lambda hub_id: None)
    monkeypatch.chdir(tmp_path)
    here = "no directory models/broook here, and " if error is HubUnreachableError else "^"
    with pytest.raises(error, match=f"{here}models/broook was not looked up"):
        list_model(HubId(repo="models/broook"))
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match="no directory models/broook here, though there is models;"):
        list_model(HubId(repo="models/broook"))


@pytest.mark.parametrize("named", ["hf-mirror.com", ""])
def test_a_mirror_that_is_no_address_is_named(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """People set it as they say it; files that are here need it no more than an unreachable hub."""
    monkeypatch.setattr(constants, "ENDPOINT", named)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(HubUnreachableError, match=f"HF_ENDPOINT is '{named}'; it begins with http"):
        hub._ask(HubId(repo="org/name"))


@pytest.mark.parametrize(
    ("pasted", "model"),
    [
        ("https://huggingface.co/Org/Name-1.5", "Org/Name-1.5"),
        ("https://huggingface.co/Org/Name/", "Org/Name"),
        ("huggingface.co/Org/Name/tree/main", "Org/Name"),
        ("https://hf.co/Org/Name/tree/v2", "Org/Name@v2"),
        ("https://huggingface.co/Org/Name/blob/main/a-Q4_K_M.gguf?x=1", "Org/Name:a-Q4_K_M.gguf"),
        ("hf://Org/Name", "Org/Name"),
        ("Org/Name@v2:a.gguf", "Org/Name@v2:a.gguf"),
        # What is no model's page stays, for what reads it to tell of.
        ("https://huggingface.co/datasets/Org/Name", "https://huggingface.co/datasets/Org/Name"),
        ("https://huggingface.co/Org", "https://huggingface.co/Org"),
        ("https://example.org/Org/Name", "https://example.org/Org/Name"),
        ("brook", "brook"),
        (r"C:\models\brook", r"C:\models\brook"),
    ],
)
def test_the_address_of_a_models_page_is_its_id(pasted: str, model: str) -> None:
    assert typed_model(pasted) == model


def test_a_directory_goes_before_what_looks_like_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huggingface.co" / "Org" / "Name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert typed_model("huggingface.co/Org/Name") == "huggingface.co/Org/Name"
