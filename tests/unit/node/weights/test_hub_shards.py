"""Models from a hub, against one that runs here."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest
import torch
from filelock import FileLock
from huggingface_hub import hf_hub_download
from huggingface_hub.utils import close_session
from safetensors.torch import save_file

from dht.checkpoints import gguf_model
from dht.checkpoints import hub as hub_files
from dht.checkpoints.gguf_model import hub_model
from dht.checkpoints.hub import (
    HubConfig,
    HubId,
    fetch_bytes,
    fetch_small_files,
    list_model,
    snapshot,
)
from dht.checkpoints.model_files import listed_root
from dht.errors import NetworkError, UserError
from node.weights.hub_shards import open_hub_model
from node.weights.safetensors_header import DamagedError
from node.weights.store import WeightStore
from testing.gguf_files import of_kind, tokens_of, write_gguf
from tests.unit.node import fake_hub
from tests.unit.node.fake_hub import COMMIT, FakeHub

REPO = HubId(repo="org/tiny")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NUMBERS = 64 << 10
BLOCK_BYTES = 64 << 10
"""Maximum bytes that are read of a connection at once."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"pickled")
    generator = torch.Generator().manual_seed(0)
    names = {"a.weight": FIRST, "b.weight": FIRST, "c.weight": SECOND}
    for shard in (FIRST, SECOND):
        mine = [name for name, file in names.items() if file == shard]
        save_file({n: torch.randn(NUMBERS, generator=generator) for n in mine}, directory / shard)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "hf"
    monkeypatch.setattr(hub_constants, "HF_HOME", str(home))
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(hub_files, "HUB_BOUNDS", HubConfig(again_s=0.001))
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub waits between attempts
    with FakeHub().running() as running:
        running.add(REPO.repo, model)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "ENDPOINT", running.url)
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


def test_only_the_files_of_the_range_are_fetched(hub: FakeHub, model: Path) -> None:
    store = open_hub_model(REPO)
    assert store.root == WeightStore.open(str(model)).root
    assert not (store.directory / FIRST).exists()
    progress: list[tuple[int, int]] = []
    store.fetch(["c.weight"], lambda done, total: progress.append((done, total)))
    size_bytes = (model / SECOND).stat().st_size
    assert progress[-1] == (size_bytes, size_bytes)
    local = dict(WeightStore.open(str(model)).read(["c.weight"]))
    assert torch.equal(dict(store.read(["c.weight"]))["c.weight"], local["c.weight"])
    assert store.bytes_read <= 1.1 * 4 * NUMBERS
    assert not (store.directory / FIRST).exists()
    assert (store.directory / SECOND).is_symlink()
    assert hub.bytes_of(".bin") == 0
    assert not any(asked.token for asked in hub.asked)


def test_what_is_cached_is_not_fetched_or_hashed_again(hub: FakeHub) -> None:
    dict(open_hub_model(REPO).read(["a.weight", "c.weight"]))
    hub.asked.clear()
    again = open_hub_model(REPO)
    dict(again.read(["a.weight"]))
    assert [asked.path for asked in hub.asked] == ["/api/models/org/tiny"]
    assert again.bytes_read <= 1.1 * 4 * NUMBERS


@pytest.mark.parametrize("damaged", [False, True])
def test_of_another_commit_only_what_differs_is_fetched(
    damaged: bool, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_hub_model(REPO)
    right = dict(before.read(["a.weight", "c.weight"]))
    if damaged:
        (before.directory / SECOND).resolve().write_bytes(b"")
    monkeypatch.setattr(fake_hub, "COMMIT", "b" * 40)
    hub.models[REPO.repo]["README.md"] = b"now with an author"
    hub.asked.clear()
    after = open_hub_model(REPO)
    assert after.directory != before.directory
    read = dict(after.read(["a.weight", "c.weight"]))
    assert all(torch.equal(read[name], right[name]) for name in right)
    fetched_bytes = len(hub.models[REPO.repo][SECOND]) if damaged else 0
    assert hub.bytes_of(".safetensors") == fetched_bytes


def test_an_interrupted_fetch_goes_on(hub: FakeHub, model: Path) -> None:
    store = open_hub_model(REPO)
    hub.cut_at = [100_000] + [0] * 8
    with pytest.raises(NetworkError, match=r"100000 of .* bytes .* are kept"):
        store.fetch(["c.weight"])
    hub.cut_at.clear()
    hub.asked.clear()
    progress: list[tuple[int, int]] = []
    again = open_hub_model(REPO)  # as after the process was killed
    again.fetch(["c.weight"], lambda done, total: progress.append((done, total)))
    size_bytes = (model / SECOND).stat().st_size
    assert [asked.range for asked in hub.asked if asked.path.endswith(SECOND)] == ["bytes=100000-"]
    assert hub.bytes_of(SECOND) == size_bytes - 100_000
    assert 100_000 < progress[0][0] <= 100_000 + BLOCK_BYTES
    assert len(dict(again.read(["c.weight"]))) == 1


def test_a_connection_that_breaks_is_taken_up_at_once(hub: FakeHub, model: Path) -> None:
    store = open_hub_model(REPO)
    hub.cut_at = [100_000, 50_000]
    assert len(dict(store.read(["c.weight"]))) == 1
    ranges = [asked.range for asked in hub.asked if asked.path.endswith(SECOND)][1:]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_hub_without_ranges_is_read_from_the_start(hub: FakeHub) -> None:
    hub.ignore_ranges = True
    store = open_hub_model(REPO)
    hub.cut_at = [100_000]
    assert len(dict(store.read(["c.weight"]))) == 1


def test_a_file_that_came_damaged_is_fetched_again_once(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_hub_model(REPO)
    hub.flip = 1
    assert len(dict(store.read(["c.weight"]))) == 1
    assert f"{SECOND} of org/tiny is damaged" in caplog.text
    hub.flip = 2
    with pytest.raises(DamagedError, match=f"{FIRST} of org/tiny is damaged"):
        dict(store.read(["a.weight"]))
    assert hub.flip == 0
    assert not (store.directory / FIRST).exists()
    assert len(dict(store.read(["a.weight"]))) == 1


@pytest.mark.parametrize("noted", [True, False])
def test_a_cached_file_that_was_damaged_is_fetched_again_once(noted: bool, hub: FakeHub) -> None:
    store = open_hub_model(REPO)
    right = dict(store.read(["c.weight"]))["c.weight"]
    blob = (store.directory / SECOND).resolve()
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 16
    blob.write_bytes(content)
    if not noted:
        for note in Path(hub_constants.HF_HOME, "anabranch", "shards").glob("*.json"):
            note.unlink()
        store = open_hub_model(REPO)
    hub.asked.clear()
    assert torch.equal(dict(store.read(["c.weight"]))["c.weight"], right)
    assert hub.bytes_of(SECOND) == len(content)
    blob.write_bytes(content)
    hub.flip = 1
    with pytest.raises(DamagedError):
        dict(store.read(["c.weight"]))


def test_a_damaged_cache_without_the_hub_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_hub_model(REPO)
    dict(store.read(["c.weight"]))
    blob = (store.directory / SECOND).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DamagedError, match=r"tensor c\.weight"):
        dict(store.read(["c.weight"]))


def test_offline_serves_from_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"org/tiny is neither .* HF_HUB_OFFLINE"):
        open_hub_model(REPO)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    first = open_hub_model(REPO)
    dict(first.read(["c.weight"]))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    store = open_hub_model(REPO)
    assert store.root == first.root
    assert len(dict(store.read(["c.weight"]))) == 1
    with pytest.raises(UserError, match=f"{FIRST} of org/tiny is neither here nor in the cache"):
        dict(store.read(["a.weight"]))
    assert hub.asked == []


def test_offline_takes_what_other_tools_cached(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors.index.json", FIRST, SECOND):
        hf_hub_download(REPO.repo, name)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    store = open_hub_model(REPO)
    assert len(dict(store.read(["a.weight", "c.weight"]))) == 2


def test_a_hub_that_is_away_does_not_stop_what_is_cached(hub: FakeHub) -> None:
    dict(open_hub_model(REPO).read(["c.weight"]))
    hub.status = 503
    store = open_hub_model(REPO)
    assert len(dict(store.read(["c.weight"]))) == 1
    with pytest.raises(NetworkError, match="org/tiny"):
        store.fetch(["a.weight"])


def test_the_token_is_sent_when_it_is_set(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"  # noqa: S105
    with pytest.raises(UserError, match="set HF_TOKEN"):
        open_hub_model(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert len(dict(open_hub_model(REPO).read(["c.weight"]))) == 1
    assert {asked.token for asked in hub.asked[1:]} == {"Bearer hf_secret"}


def test_what_the_hub_refuses_is_one_plain_line(hub: FakeHub) -> None:
    def refused(text: str, kind: type[Exception], words: str) -> None:
        hub_id = HubId.parse(text)
        assert hub_id is not None
        with pytest.raises(kind, match=words) as caught:
            open_hub_model(hub_id)
        assert len(" ".join(str(caught.value).split())) < 300

    refused("org/missing", UserError, "org/missing is neither a directory here nor a model at http")
    refused("org/tiny@nowhere", UserError, "org/tiny@nowhere: there is no such branch")
    hub.gated = True
    refused("org/tiny", UserError, "is gated: accept its terms")
    hub.gated = False
    for status, kind in ((403, UserError), (429, NetworkError), (500, NetworkError)):
        hub.status = status
        refused("org/tiny@main", kind, str(status))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json"),
        ({"config.json": b'{"model_type": "x", "auto_map": {}}'}, "org/odd needs code of its own"),
        (
            {"config.json": b'{"model_type": "x"}', "pytorch_model.bin": b""},
            "org/odd has no safetensors files .only pytorch_model.bin",
        ),
        (
            {
                "config.json": b'{"model_type": "x"}',
                "model.safetensors.index.json": b'{"weight_map": {"a": "../../b.safetensors"}}',
            },
            "which is not there",
        ),
        (
            {"config.json": b'{"model_type": "x"}', "model.safetensors": b"\xff" * 100},
            "its header cannot have",
        ),
    ],
)
def test_odd_models_are_refused(files: dict[str, bytes], words: str, hub: FakeHub) -> None:
    hub.models["org/odd"] = files
    with pytest.raises(UserError, match=words):
        open_hub_model(HubId(repo="org/odd"))


def test_a_stopped_fetch_ends(hub: FakeHub) -> None:
    store = open_hub_model(REPO)
    store.stop()
    with pytest.raises(NetworkError, match="stopped"):
        store.fetch(["c.weight"])


def test_two_who_fetch_one_file_at_once_fetch_it_once(hub: FakeHub, model: Path) -> None:
    stores = [open_hub_model(REPO), open_hub_model(REPO)]
    hub.asked.clear()
    with ThreadPoolExecutor(len(stores)) as pool:
        read = list(pool.map(lambda store: dict(store.read(["c.weight"])), stores))
    assert torch.equal(read[0]["c.weight"], read[1]["c.weight"])
    assert hub.bytes_of(SECOND) == (model / SECOND).stat().st_size


def stop_while_it_waits(pool: ThreadPoolExecutor, store: WeightStore) -> None:
    fetching = pool.submit(store.fetch, ["c.weight"])
    with pytest.raises(TimeoutError):
        fetching.result(0.2)
    store.stop()
    with pytest.raises(NetworkError, match="stopped"):
        fetching.result(60)


def test_who_waits_for_another_fetch_can_be_stopped(hub: FakeHub, model: Path) -> None:
    store = open_hub_model(REPO)
    sha256 = hashlib.sha256((model / SECOND).read_bytes()).hexdigest()
    blobs = store.directory.parents[1] / "blobs"
    with ThreadPoolExecutor(1) as pool, FileLock(blobs / f"{sha256}.lock"):
        stop_while_it_waits(pool, store)
    assert not (store.directory / SECOND).exists()


def test_a_file_longer_than_it_was_listed_is_not_taken(hub: FakeHub) -> None:
    store = open_hub_model(REPO)
    hub.models[REPO.repo][SECOND] += bytes(1 << 20)
    with pytest.raises(NetworkError, match="something else than"):
        store.fetch(["c.weight"])
    [partial] = (store.directory.parents[1] / "blobs").glob("*.partial")
    assert partial.stat().st_size == 0
    partial.write_bytes(bytes(1000))
    with pytest.raises(NetworkError, match="something else than"):
        store.fetch(["c.weight"])
    assert partial.stat().st_size == 1000


def test_of_a_file_whose_length_is_not_said_no_more_is_kept_than_listed(hub: FakeHub) -> None:
    store = open_hub_model(REPO)
    hub.models[REPO.repo][SECOND] += bytes(1 << 20)
    hub.unmeasured = hub.ignore_ranges = True
    hub.cut_at = [100_000]
    assert len(dict(store.read(["c.weight"]))) == 1


def test_what_a_connection_brought_is_kept_however_little(hub: FakeHub, model: Path) -> None:
    store = open_hub_model(REPO)
    size_bytes = (model / SECOND).stat().st_size
    hub.cut_at = [20_000] * (size_bytes // 20_000)
    hub.asked.clear()
    seen: list[int] = []
    store.fetch(["c.weight"], lambda done, _: seen.append(done))
    assert hub.bytes_of(SECOND) == size_bytes
    assert seen[0] <= 20_000


HTML = b"<html>Please log in</html>"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"Content-Type": "text/html"}),
        (206, {"Content-Range": "bytes 99000-99025/262224"}),
        (206, {"Content-Range": "bytes 100000-100025/262225"}),
        (206, {}),
        (416, {"Content-Range": "bytes */10"}),
        (429, {}),
        (500, {}),
        (503, {"Retry-After": "0"}),
    ],
)
def test_what_is_no_part_of_the_file_is_not_taken(
    status: int, headers: dict[str, str], hub: FakeHub, model: Path
) -> None:
    store = open_hub_model(REPO)
    hub.cut_at = [100_000]
    other = (status, headers, HTML)
    hub.answers = [other, None, other]
    hub.asked.clear()
    assert len(dict(store.read(["c.weight"]))) == 1
    assert hub.bytes_of(SECOND) == (model / SECOND).stat().st_size + 2 * len(HTML)
    assert not hub.answers


@pytest.mark.parametrize(
    ("said", "least_s"),
    [
        ("7", 7.0),
        ("Sun, 29 Nov 2026 12:00:09 GMT", 9.0),
        ("Sat, 28 Nov 2026 12:00:00 GMT", 0.0),
        ("99999999999", 300.0),
        ("soon", 0.0),
    ],
)
def test_a_hub_that_asks_to_wait_is_waited_for(
    said: str, least_s: float, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = list_model(REPO)
    now = "Sun, 29 Nov 2026 12:00:00 GMT"  # whatever the clock here says
    monkeypatch.setattr("http.server.BaseHTTPRequestHandler.date_time_string", lambda _: now)
    hub.answers = [(429, {"Retry-After": said}, b"")] * 2
    waited: list[float] = []
    size_bytes = listing.files[SECOND].size_bytes
    got = b"".join(fetch_bytes(listing, SECOND, 0, size_bytes, waited.append))
    assert got == hub.models[REPO.repo][SECOND]
    assert waited == [max(least_s, 0.001), max(least_s, 0.002)]


def test_who_waits_for_the_hub_can_be_stopped(hub: FakeHub) -> None:
    store = open_hub_model(REPO)
    hub.answers = [(429, {"Retry-After": "300"}, b"")]
    with ThreadPoolExecutor(1) as pool:
        stop_while_it_waits(pool, store)
    assert not hub.answers


@pytest.mark.parametrize("path", ["/api/models/org/tiny", SECOND])
def test_a_hub_that_falls_silent_is_given_up(
    path: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(hub_constants, name, 0.05)
    hub.stalls = path
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_hub_model, REPO)
        try:
            with pytest.raises(NetworkError, match="cannot be reached"):
                opening.result(60)
        finally:
            hub.stalls = ""


@pytest.mark.parametrize("place", ["", "hub", "hub/models--org--tiny/blobs", "full"])
def test_a_disk_that_takes_nothing_is_this_machines_trouble(
    place: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the hub's: it would be asked again and again, while others count on this peer."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "hf" / place
    if place == "full":
        monkeypatch.setattr("os.replace", full)
        monkeypatch.setattr("pathlib.Path.replace", full)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    with pytest.raises(
        UserError, match=r"org/tiny cannot be fetched: .*(directory|File exists|No space)"
    ):
        open_hub_model(REPO).fetch(["c.weight"])


@pytest.mark.parametrize(
    ("proxy", "kind", "words"),
    [
        ("http://127.0.0.1:9", NetworkError, "cannot be reached"),
        ("socks5://127.0.0.1:9", UserError, "SOCKS"),
        ("gopher://127.0.0.1:9", UserError, "gopher"),
    ],
)
def test_a_proxy_that_is_no_use_is_one_plain_line(
    proxy: str, kind: type[Exception], words: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setenv("http_proxy", proxy)
    close_session()
    try:
        with pytest.raises(kind, match=f"org/tiny.*{words}"):
            open_hub_model(REPO)
    finally:
        close_session()
    assert not hub.asked


def test_a_client_fetches_only_the_text_files(hub: FakeHub) -> None:
    directory = fetch_small_files(list_model(REPO))
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "tokenizer.json"]
    assert directory.is_relative_to(hub_constants.HF_HUB_CACHE)
    assert directory.name == COMMIT
    assert hub.bytes_of(".safetensors") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId(repo="org/name")),
        ("Org-1/na.me_2@v1.0", HubId(repo="Org-1/na.me_2", revision="v1.0")),
        ("a/b@refs/pr/1", HubId(repo="a/b", revision="refs/pr/1")),
        *[(t, None) for t in ("name", "./a", "/a/b", "~/a", "a/b/c", "a/", "/b", "a/b@", "../b")],
        ("a/..", None),
    ],
)
def test_hub_ids_are_told_from_paths(text: str, expected: HubId | None) -> None:
    assert HubId.parse(text) == expected


GGUF = HubId(repo="org/tiny-GGUF", file="brook.gguf")


@pytest.fixture
def gguf_file(hub: FakeHub, tmp_path: Path) -> Path:
    """The bundled model as a GGUF file, which the hub has, too, beside another."""
    file = tmp_path / "files" / "brook.gguf"
    file.parent.mkdir()
    brook = Path("models/brook")
    write_gguf(brook, file, of_kind("Q8_0"), tokens=tokens_of(brook))
    (file.parent / "brook-F32.gguf").write_bytes(b"")
    hub.add(GGUF.repo, file.parent)
    return file


def test_of_a_gguf_file_on_the_hub_the_header_comes_first(
    hub: FakeHub, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "HEADER_GUESS_BYTES", 1 << 16)
    store = open_hub_model(GGUF)
    assert store.root == WeightStore.open(str(gguf_file)).root
    size_bytes = gguf_file.stat().st_size
    assert hub.bytes_of("brook.gguf") < size_bytes / 2
    hub.asked.clear()
    name = "blk.3.ffn_up.weight"
    read = dict(store.read([name]))[name]
    assert torch.equal(read, dict(WeightStore.open(str(gguf_file)).read([name]))[name])
    assert hub.bytes_of("brook.gguf") == size_bytes
    hub.asked.clear()
    dict(open_hub_model(GGUF).read([name]))
    assert [asked.path for asked in hub.asked] == ["/api/models/org/tiny-GGUF"]


def test_clients_fetch_no_weights_of_a_gguf_file(hub: FakeHub, gguf_file: Path) -> None:
    listing, directory = hub_model(GGUF)
    assert listed_root(listing, directory) == WeightStore.open(str(gguf_file)).root
    assert (directory / "tokenizer.json").is_file()
    assert not (snapshot(listing) / "brook.gguf").exists()


def test_a_repository_of_gguf_files_needs_the_name_of_one(hub: FakeHub, gguf_file: Path) -> None:
    with pytest.raises(UserError, match=r"as org/tiny-GGUF:FILE: brook-F32\.gguf, brook\.gguf$"):
        open_hub_model(HubId(repo=GGUF.repo))
    for file in ("brook-Q4_0.gguf", "Q8_0"):
        with pytest.raises(UserError, match=r"it has brook-F32\.gguf, brook\.gguf$"):
            open_hub_model(HubId(repo=GGUF.repo, file=file))
    with pytest.raises(UserError, match=r"brook-F32\.gguf of org/tiny-GGUF is damaged"):
        open_hub_model(HubId(repo=GGUF.repo, file="brook-F32.gguf"))


def test_ids_name_revisions_and_files() -> None:
    assert HubId.parse("org/m") == HubId(repo="org/m")
    assert HubId.parse("org/m@v1:a/b-00001-of-00002.gguf") == HubId(
        repo="org/m", revision="v1", file="a/b-00001-of-00002.gguf"
    )
    for text in ("org/m@v1:a.gguf", "org/m:Model-Q4_K_M.gguf"):
        assert str(HubId.parse(text)) == text
    for text in ("org/m:", "org/m:a b", "m:a.gguf", "org/m:/a"):
        assert HubId.parse(text) is None
