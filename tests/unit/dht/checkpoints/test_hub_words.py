"""What is said of a model that is neither here nor looked up on the hub."""

from pathlib import Path

import pytest

from dht.checkpoints import hub
from dht.checkpoints.hub import HubId, HubOfflineError, HubUnreachableError, list_model
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
