"""Wrong inputs: one line that names what is wrong and what to do, and exit code 2."""

import shlex
import sys
from pathlib import Path

import pytest

from anabranch import commands

HERE = "join --model models/brook --cpu --identity {tmp}/id.key"
PEER = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ASK = f"ask --initial-peers {PEER} --model models/brook"

WRONG = {
    # flags that are none
    "join --modell X": "--modell is no flag of this command; did you mean --model?",
    "join --gpus 0": "--gpus is no flag of this command; did you mean --gpu?",
    "join --max-upp 3": "did you mean --max-up?",
    "join --monthly-kap=3": "did you mean --monthly-cap?",
    "join --shedule 22:00-07:30": "did you mean --schedule?",
    "join --prot 31337": "did you mean --port?",
    "join --zzzzzz": "--zzzzzz is no flag of this command (--help lists",
    "ask --temprature 0.5": "--temprature is no flag of this command; did you mean --temperature?",
    "ask --promt hello": "did you mean --prompt?",
    "ask --max-new-token 5 --promt x": "did you mean --max-new-tokens?",
    "ask -p hello": "-p is no flag of this command",
    "chat --sytem X": "did you mean --system?",
    "serve --prot 8000": "did you mean --port?",
    "page --titel x": "--titel is no flag of this command",
    "status --jsn": "--jsn is no flag of this command",
    "models --jsno": "did you mean --json?",
    "invite --qrr": "did you mean --qr?",
    "doctor --prot 5": "did you mean --port?",
    "plan --gpuss 3x3090": "--gpuss is no flag of this command",
    "simulate --clustr x": "--clustr is no flag of this command",
    "ask --temp 0.5 --prompt x": "--temp is no flag of this command; did you mean --temperature?",
    "chat --prompt hello": "--prompt is no flag of this command (--help lists",
    "status --net x": "did you mean --network?",
    "serve --m brook": "did you mean --model or --models or --max-body?",
    "simulate {tmp}/none.json": "cannot read {tmp}/none.json: No such file",
    # words in the wrong place
    "ask hello": "a prompt goes behind --prompt: --prompt hello",
    "ask 'One morning'": "a prompt goes behind --prompt: --prompt 'One morning'",
    "ask org/name": "'org/name' is no invitation; a model goes behind --model: --model org/name",
    "ask models/brook": "a model goes behind --model",
    "join org/name": "a model goes behind --model: --model org/name",
    "join models/brook": "a model goes behind --model",
    "join brook": "a model goes behind --model",
    f"join {PEER}": "an address goes behind --initial-peers",
    "chat hello": "'hello' is no invitation",
    "status hello": "'hello' is no invitation",
    "doctor hello": "an invitation begins with anabranch:",
    "join anabranch:nonsense": "invitation",
    "ask anabranch:nonsense --prompt x": "invitation",
    f"{ASK} --prompt x hello": "is no invitation; a prompt goes behind --prompt",
    # numbers that are none, or none that counts
    "join --memory 8GB": "'8GB' is no number of GiB; give the number alone, such as 8",
    "join --memory eight": "'eight' is no number of GiB",
    f"{HERE} --memory nan": "--memory is nan; it must be a finite number above 0",
    f"{HERE} --memory 0": "--memory is 0; it must be a finite number above 0",
    f"{HERE} --max-vram inf": "--max-vram is for a GPU; of the CPU, --memory says",
    "join --model models/brook --gpu 0 --max-vram inf": "--max-vram is inf; it must be between",
    "join --max-up 20Mbit": "'20Mbit' is no number of megabits per second",
    "join --monthly-cap 300GB": "'300GB' is no number of GB",
    "join --power-limit 180W": "'180W' is no number of watts",
    "join --port http": "--port: 'http' is no whole number",
    "join --port 1.5": "'1.5' is no whole number",
    "join --threads all": "--threads: 'all' is no whole number",
    "join --gpu first": "give numbers such as 0 or 0,1",
    f"{ASK} --prompt x --temperature hot": "--temperature: 'hot' is no number",
    f"{ASK} --prompt x --max-new-tokens many": "'many' is no whole number",
    f"{HERE} --port 99999": "--port is 99999; it must be between",
    f"{HERE} --threads 0": "--threads is 0; it must be at least 1",
    f"{HERE} --max-up 0": "--max-up is 0; it must be at least 1",
    f"{HERE} --monthly-cap -5": "--monthly-cap is -5",
    f"{HERE} --power-limit 180": "--power-limit is for a GPU",
    f"{HERE} --schedule tonight": "--schedule: ",
    f"{HERE} --layers all": "--layers is 'all'; it must be START:END",
    f"{HERE} --host my-pc": "cannot listen on 'my-pc': --host takes an IP address",
    f"{HERE} --announce here": "--announce: it must be HOST:PORT",
    f"{HERE} --coordinators me": "--coordinators names 'me', which is no peer id",
    f"{HERE} --network a/b": "--network is 'a/b'",
    "join --cpu --gpu 0": "not allowed with argument",
    "join --model models/brook --models a b": "give one",
    "join --yes": "--yes goes with --models",
    # files
    "join --config {tmp}/none.toml": "{tmp}/none.toml cannot be read",
    "join --config {tmp}/no-toml": "{tmp}/no-toml: it is not TOML",
    "join --config {tmp}/unknown.toml": "{tmp}/unknown.toml: 'modell' is no flag of this; did you",
    "join --config {tmp}/list.toml": "{tmp}/list.toml: model takes one value, not a list",
    "join --config {tmp}/word.toml": "{tmp}/word.toml: idle-only is 'yes'; give true or false",
    "join --config {tmp}/number.toml": "{tmp}/number.toml: argument --memory: '8GB' is no number",
    "networks --list {tmp}/none.toml": "{tmp}/none.toml cannot be read",
    "networks --list {tmp}/no-toml": "this is no list of networks",
    "page {peer} --data {tmp}": "--data {tmp} cannot be used",
    "simulate x.json --plot {tmp}/no-toml": "error: --plot ",
    "serve {peer} --api-key-file {tmp}/none": "{tmp}/none: No such file",
    "serve {peer} --request-log {tmp}": "--request-log {tmp}: Is a directory",
    # one of a few values
    f"{ASK} --prompt x --priority mid": "--priority: 'mid' is not known: give one of normal, high",
    f"{ASK} --prompt x --transport x": "--transport: 'x' is not known: give one of auto",
    f"{ASK} --prompt x --logprobs 3": "log probabilities are printed with --json alone",
    f"{ASK} --prompt x --fingerprint zz": "'zz' is no fingerprint",
    f"ask --initial-peers {PEER} --model {{tmp}} --prompt x": "{tmp} has no config.json; is it a",
    f"{ASK} --prompt x --network a/b": "--network is 'a/b'; it takes 1 to",
    # what would let nobody in
    "serve {peer} --allow-origin example.org": "--allow-origin is 'example.org'; give scheme",
    "serve {peer} --allow-origin https://a/b": "--allow-origin is 'https://a/b'; give scheme",
    "serve {peer} --allow-host https://a": "--allow-host is 'https://a'; give the name alone",
    "serve {peer} --allow-host a.org:8000": "--allow-host is 'a.org:8000'; give the name alone",
    # commands
    # an empty value, mostly a variable of a shell that was never set
    "alive --identity ''": "--identity: it is empty; leave it out or give a value",
    "join --model ''": "--model: it is empty",
    "join --models brook ''": "--models: it is empty",
    f"{HERE} --pause-on-process=": "--pause-on-process: it is empty",
    f"{HERE} --draft ''": "--draft: it is empty",
    f"{HERE} --port ''": "--port: it is empty",
    f"{ASK} --prompt ''": "--prompt: it is empty",
    "serve {peer} --api-key-file ''": "--api-key-file: it is empty",
    "join --config {tmp}/empty.toml": "{tmp}/empty.toml: argument --model: it is empty",
    "join --identity /": "--identity names no file",
    "join --config {tmp}": "--config {tmp} cannot be read: Is a directory",
    # bytes that are no text
    f"{HERE} --name caf\udce9": "--name: it is not valid UTF-8 text",
    f"{HERE} --model-name caf\udce9": "--model-name: it is not valid UTF-8 text",
    f"{ASK} --prompt caf\udce9": "--prompt: it is not valid UTF-8 text",
    f"{HERE} --max-up 1e12": "--max-up is 1e+12; it must be between 1 and 1e+09",
    f"{HERE} --announce 203.0.113.7:0": "--announce: others dial a port of 1 or more",
    "plan --load much": "--load: 'much' is not known here",
    "forget x": "'x' is one word too many (--help lists",
    "networks --announce": "--announce and --contact go together",
    "networks anabranch:nonsense": "an invitation goes with --announce",
    "update": "was not installed by install.sh",
    "update --dryrun": "did you mean --dry-run?",
    "jion": "'jion' is no command; did you mean join?",
    "--modell": "'--modell' is no command",
    "completion fish": "'fish' is not known: give bash or zsh",
    "completion bash zsh": "'zsh' is not known: give bash or zsh",
    "networks --about x": "--about goes with --announce",
    "plan --gpu 3x3090": "--gpu is no flag of this command; did you mean --gpus?",
    "simulate x.json --rate 5": "--rate goes with --mode online",
}
FILES = {
    "no-toml": "model: brook",
    "unknown.toml": 'modell = "brook"',
    "list.toml": 'model = ["a", "b"]',
    "empty.toml": 'model = ""',
    "word.toml": 'idle-only = "yes"',
    "number.toml": 'memory = "8GB"',
}


def test_there_are_sixty() -> None:
    assert len(WRONG) >= 60


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_input_is_one_line_that_says_what_to_do(
    typed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    monkeypatch.setenv("ANABRANCH_MEMORY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parents[2])
    network = f"--initial-peers {PEER} --model models/brook"
    words = shlex.split(typed.replace("{tmp}", str(tmp_path)).replace("{peer}", network))
    monkeypatch.setattr(sys, "argv", ["anabranch", *words])
    code = commands.main()
    err = capsys.readouterr().err
    assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), err
    assert WRONG[typed].replace("{tmp}", str(tmp_path)) in err
