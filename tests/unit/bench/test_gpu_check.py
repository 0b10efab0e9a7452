"""The parts of a GPU's check: run, kept, told why not, and taken up again."""

import json
import sys
from pathlib import Path

import pytest

from bench.gpu import check as gpu_check
from bench.gpu.check import Part, parts, read_json, read_tests, run_part
from bench.gpu.engine_gpu import FULL


def script(body: str) -> tuple[str, ...]:
    return (sys.executable, "-c", body, "{out}")


def part(body: str, limit_s: float = 60.0) -> Part:
    return Part(command=script(body), limit_s=limit_s, read=read_json)


WRITES = "import sys; open(sys.argv[1], 'w').write('{\"figure\": 1}')"


def test_a_part_is_what_it_wrote() -> None:
    told = run_part(part(WRITES), 60)
    assert told["ok"]
    assert told["found"] == {"figure": 1}


def test_what_a_part_found_before_it_failed_stays() -> None:
    told = run_part(part(f"{WRITES}; sys.exit('no more memory')"), 60)
    assert not told["ok"]
    assert told["found"] == {"figure": 1}
    assert told["ended"] == "exit code 1"
    assert "no more memory" in told["said"]


def test_a_part_without_end_is_stopped() -> None:
    told = run_part(part("import time; time.sleep(600)"), 0.5)
    assert told["ended"] == "stopped after 0 s"


def test_a_part_that_cannot_run_says_why() -> None:
    missing = Part(command=(), limit_s=1, read=read_json, missing="it is not installed")
    assert run_part(missing, 1) == {"ok": False, "skipped": "it is not installed"}


def test_tests_are_counted_and_failures_named(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure message='off"
        " by 0.3'/></testcase><testcase name='c'><skipped message='no'/></testcase>"
        "</testsuite></testsuites>"
    )
    assert read_tests(path) == {
        "tests": 3,
        "failure": [{"test": "b", "said": "off by 0.3"}],
        "error": [],
        "skipped": [{"test": "c", "said": "no"}],
    }


def test_a_second_run_goes_on_with_what_is_missing_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = tmp_path / "check.json", []

    def once(each: Part, limit_s: float) -> dict[str, object]:
        ran.append(each)
        failed = len(ran) == 2
        return {"ok": not failed, **gpu_check.code(), **({"said": "x"} if failed else {})}

    todo = {name: part(WRITES) for name in ("one", "two", "three")}
    monkeypatch.setattr(gpu_check, "parts", lambda device, *, tiny: todo)
    monkeypatch.setattr(gpu_check, "run_part", once)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--out", str(out)])
    assert gpu_check.main() == 1
    assert ran == list(todo.values())
    assert gpu_check.main() == 0
    assert ran[3:] == [todo["two"]]
    assert all(each["ok"] for each in json.loads(out.read_text())["parts"].values())


def test_every_command_writes_where_it_is_told() -> None:
    for tiny in (False, True):
        for name, each in parts("cuda:0", tiny=tiny).items():
            assert any("{out}" in word for word in each.command), name


def test_every_packed_shape_is_known() -> None:
    assert set(gpu_check.PACKED) == FULL.packed.keys()
