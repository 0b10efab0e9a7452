"""Mistakes: one plain line on stderr, exit code 2, no traceback."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing.forked import run
from testing.paths import ROOT

MODEL = ROOT / "models" / "brook"
DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def assert_plain(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def join(tmp_path: Path, model: Path | str, *more: str) -> subprocess.CompletedProcess[str]:
    identity = str(tmp_path / "id.key")
    return run(
        "node.join", "--model", str(model), "--identity", identity, "--host", "127.0.0.1", *more
    )


def test_a_missing_model_directory(tmp_path: Path) -> None:
    assert_plain(join(tmp_path, tmp_path / "nowhere", "--cpu"), "nowhere")


def test_a_model_without_safetensors(tmp_path: Path) -> None:
    model = copied(tmp_path)
    (model / "model.safetensors").unlink()
    assert_plain(join(tmp_path, model, "--cpu"), "safetensors")


@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_a_corrupted_file(tmp_path: Path, damage: str) -> None:
    model = copied(tmp_path)
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"\xff" * 4096)
    assert_plain(join(tmp_path, model, "--cpu"), "model.safetensors")


def test_a_draft_model_of_another_vocabulary(tmp_path: Path) -> None:
    draft = copied(tmp_path)
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    one, other = list(vocab)[500:502]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    done = join(tmp_path, MODEL, "--cpu", "--draft", str(draft))
    assert_plain(done, f"--draft {draft} has another vocabulary")


@pytest.mark.parametrize("address", ["nonsense", "/ip4/127.0.0.1/tcp/4001", "127.0.0.1:4001"])
def test_an_address_that_is_no_multiaddr(tmp_path: Path, address: str) -> None:
    assert_plain(join(tmp_path, MODEL, "--cpu", "--initial-peers", address), address)
    ask = ("--model", str(MODEL), "--prompt", "x", "--initial-peers", address)
    assert_plain(run("client.generate", *ask), address)


def test_a_file_that_is_no_identity_is_left_as_it_is(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Mine")  # others can read it, which is no matter
    done = run("node.join", "--model", str(MODEL), "--cpu", "--identity", str(readme))
    assert_plain(done, f"{readme} is no Ed25519 identity")
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"], "no lock beside it"


def test_a_folder_is_no_identity(tmp_path: Path) -> None:
    done = run("node.join", "--model", str(MODEL), "--cpu", "--identity", str(tmp_path))
    assert_plain(done, f"cannot use identity file {tmp_path}: Is a directory")


def test_all_commands_say_alike_that_nobody_answers(tmp_path: Path) -> None:
    """Code 3, for the swarm may come back: a supervisor starts such a peer again."""
    swarm = ("--model", str(MODEL), "--initial-peers", DEAD)
    every = (
        ("node.join", "--cpu", "--identity", str(tmp_path / "id.key"), "--host", "127.0.0.1"),
        ("client.generate", "--prompt", "x"),
        ("client.chat",),
        ("client.gateway", "--port", "0"),
        ("client.health", "--port", "0"),
        ("coordinator.plan",),
    )
    with ThreadPoolExecutor(len(every)) as pool:
        ended = list(pool.map(lambda command: run(*command, *swarm), every))
    for done in ended:
        assert_plain(done, f"nobody answers at {DEAD}", code=3)
    assert len({done.stderr.splitlines()[-1] for done in ended}) == 1


def test_a_gpu_that_does_not_exist(tmp_path: Path) -> None:
    assert_plain(join(tmp_path, MODEL, "--gpu", "77"), "GPU 77")


def test_less_memory_than_one_layer_needs_says_how_much_would_do(tmp_path: Path) -> None:
    done = join(tmp_path, MODEL, "--cpu", "--memory", "0.0001")
    assert_plain(done, "--memory", "GiB")


def test_what_the_machine_lacks_is_said_before_others_are_told_to_join(tmp_path: Path) -> None:
    for more in (
        ("--cpu", "--memory", "99999"),
        ("--gpu", "77"),
        ("--cpu", "--layers", "3"),
        ("--cpu", "--layers", "0:99"),
        ("--cpu", "--memory", "0.012", "--layers", "0:8"),
    ):
        done = join(tmp_path, MODEL, *more)
        assert_plain(done)
        assert "Invite others" not in done.stdout


def test_negative_memory_and_absurd_ports(tmp_path: Path) -> None:
    assert_plain(join(tmp_path, MODEL, "--cpu", "--memory", "-1"), "--memory")
    assert_plain(join(tmp_path, MODEL, "--cpu", "--port", "99999"), "--port")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "1e9"),
        ("--temperature", "nan"),
        ("--temperature", "warm"),
        ("--top-p", "-0.1"),
        ("--top-p", "2"),
        ("--top-k", "-3"),
        ("--seed", "-1"),
        ("--max-new-tokens", "0"),
        ("--prompt-ids", "1,x"),
    ],
)
def test_absurd_sampling_values(option: str, value: str) -> None:
    prompt = () if option == "--prompt-ids" else ("--prompt", "x")
    ask = ("--model", str(MODEL), "--initial-peers", DEAD, *prompt, option, value)
    assert_plain(run("client.generate", *ask), option.lstrip("-").replace("-", "").split()[0][:3])


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-up", "0"), ("--max-down", "nan"), ("--monthly-cap", "-5")]
)
def test_a_lent_connection_of_nothing(tmp_path: Path, flag: str, value: str) -> None:
    assert_plain(join(tmp_path, MODEL, "--cpu", flag, value), flag, "at least")
