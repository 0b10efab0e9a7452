"""Attacks on real peers: that each has a row, and that verdicts follow from what was measured."""

import inspect
import json
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bench.hostile import members, pages, strangers, values
from bench.hostile.__main__ import begun, main, parse
from bench.hostile.attacker import Sent, Target, chain_of
from bench.hostile.attacks import ATTACKS, Row
from bench.hostile.callers import LIMIT_S, read_answers
from bench.hostile.rows import summary
from bench.hostile.soak import growth_of
from bench.hostile.verdict import (
    Asked,
    Limits,
    Measured,
    between,
    checks,
    growth_per_min,
    in_time,
    row,
)
from bench.results_figures import CHECKS
from bench.results_table import render
from dht.errors import NetworkError
from tests.unit.records import record_of

WAYS = {
    "a plan of another model": {"plan_with_more_layers"},
    "answers of the DHT that cost the answerer": {"repeated_finds"},
    "streams that make the other side hold bytes": {"unread_pongs", "unfinished_frames"},
    "streams that hold descriptors": {"idle_streams"},
    "sessions in another's name": {"opens_in_anothers_name"},
    "plans that steer clients": {"plan_for_itself"},
    "plans that leave layers without a holder": {"plan_without_last_holders"},
    "speeds that draw all who are new": {"says_it_is_far_faster"},
    "a model described by the many": {"made_up_models"},
    "dials on order": {"dials_on_order"},
    "a leader made to look bad": {"deaf_to_the_leader"},
    "a stage that ends requests": {"calls_requests_unsound"},
    "a stage that speaks for another": {"says_another_leaves"},
    "rows that break the next stage": {"rows_of_nan"},
    "room for urgent sessions": {"claims_urgency"},
    "numbers that break the solver": {"links_near_zero"},
    "sampling that stalls the engine": {"costly_sampling"},
    "prompts that fill what a stage takes of them": {"prompts_token_by_token"},
    "grammars that nobody else gets read behind": {"crowd_of_grammars"},
    "schemas that multiply": {"laughing_schemas"},
    "text that stalls a gateway": {"huge_prompts", "long_stop_strings"},
    "bodies that fill a gateway": {"unfinished_bodies"},
    "text that controls a terminal": {"escapes_in_reasons"},
    "requests of other people's pages": {"foreign_pages"},
    "a plan larger than a frame": {"huge_plan_body"},
    "values that a library reads before they are checked": {"nested_values", "odd_answers"},
    "many records that count as one": {"thousands_in_one"},
    "connections of nobody": {"first_lines"},
    "traffic that a volunteer lends": {"probes_without_end", "calls_of_strangers"},
    "other numbers under the same names": {"other_weights"},
}
"""Ways to harm a swarm over the network, and the rows that try them."""

GOOD = Measured(
    answers=40,
    failed=(),
    ttft_before_p95_s=0.2,
    ttft_during_p95_s=0.4,
    memory_mib={"peer0": (300.0, 350.0, 305.0), "peer0's daemon": (60.0, 70.0, 50.0)},
    calm_mib=0.0,
    ended=(),
    joined=True,
    peers=4,
    following=4,
    led_by_stranger=False,
    steered=0,
    gained=0,
    escapes=0,
)


def test_every_way_has_its_rows_and_every_row_is_of_a_way() -> None:
    assert set().union(*WAYS.values()) == set(ATTACKS)


def test_every_attack_of_the_modules_is_in_the_table() -> None:
    found = {
        name: each
        for module in (strangers, members, pages, values)
        for name, each in inspect.getmembers(module, inspect.iscoroutinefunction)
        if list(inspect.signature(each).parameters) == ["target"]
        and inspect.signature(each).return_annotation is Sent
        and each.__module__ == module.__name__
    }
    assert found == {name: each.attack for name, each in ATTACKS.items()}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_row_says_what_its_attack_does(name: str) -> None:
    assert ATTACKS[name].what.endswith(".")


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        ("answers", {"failed": ("wrong tokens",)}),
        ("answers", {"answers": 0}),
        ("time", {"ttft_during_p95_s": 1.3}),
        ("time", {"ttft_during_p95_s": None}),
        ("memory_peak", {"memory_mib": {"a": (1.0, 2.0, 1.0), "b": (1.0, 66.0, 1.0)}}),
        ("memory_after", {"memory_mib": {"a": (1.0, 20.0, 9.5)}}),
        ("processes", {"ended": ("peer0: 2",)}),
        ("joining", {"joined": False}),
        ("plans", {"following": 3}),
        ("plans", {"led_by_stranger": True}),
        ("clients_plans", {"steered": 1}),
        ("gain", {"gained": 1}),
        ("terminals", {"escapes": 1}),
    ],
)
def test_one_loss_breaks_one_condition(broken: str, changes: dict[str, object]) -> None:
    assert row(GOOD, Limits())["ok"]
    measured = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert [name for name, holds in checks(measured, Limits()).items() if not holds] == [broken]
    assert not row(measured, Limits())["ok"]


def test_first_tokens_may_be_late_by_a_multiple_alone() -> None:
    limits = Limits(ttft_times=2.0)
    assert in_time(0.05, 0.1, limits)
    assert not in_time(0.05, 0.11, limits)
    assert in_time(3.0, 6.0, limits)
    assert not in_time(3.0, 6.1, limits)


def test_a_row_is_plain_data_with_its_growth() -> None:
    found = json.loads(json.dumps(row(GOOD, Limits())))
    assert (found["more_peak_mib"], found["more_after_mib"]) == (50.0, 5.0)
    assert found["memory_mib"]["peer0"] == [300.0, 350.0, 305.0]
    assert set(found) >= {field.name for field in fields(Measured)}


def test_a_slope_is_per_minute() -> None:
    steady = growth_per_min([(at, 5.0 + at / 30) for at in range(0, 600, 5)])
    assert steady.slope == pytest.approx(2.0)
    assert not steady.within(1.9)
    assert growth_per_min([(at, 7.0) for at in range(100)]).slope == pytest.approx(0.0)
    assert growth_per_min([(1.0, 1.0), (2.0, 9.0)]).slope == 0.0


def test_what_comes_and_goes_is_no_growth_and_does_not_hide_any() -> None:
    rng = random.Random(1)
    times = [60.0 * minute for minute in range(30)]
    restless = growth_per_min([(at, rng.uniform(400, 500)) for at in times])
    assert restless.error > 0.5
    assert restless.within(0.5)
    leaking = growth_per_min([(at, at / 12 + rng.uniform(400, 500)) for at in times])
    assert not leaking.within(0.5)


def test_answers_belong_to_when_they_were_begun() -> None:
    asked = [Asked(began_unix_s=at, ttft_s=0.1, failed=None) for at in (1.0, 2.0, 3.0)]
    assert [each.began_unix_s for each in between(asked, 2.0, 3.0)] == [2.0]


def test_an_answer_that_never_ends_has_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    told = {"began_unix_s": 1.0, "ttft_s": 0.2, "failed": None, "planner": "p"}
    lines = [json.dumps({"began_unix_s": 1.0}), "WARN something", json.dumps(told)]
    log.write_text("\n".join([*lines, json.dumps({"began_unix_s": 5.0})]))
    assert read_answers(log, 6.0) == [Asked(**told)]  # type: ignore[arg-type]
    one, two = read_answers(log, 6.0 + 2 * LIMIT_S)
    assert one.failed is None
    assert two.failed == "it never ended"


def test_a_chain_covers_all_layers_or_is_none() -> None:
    nodes = {n: record_of(n, s, e) for n, s, e in (("a", 0, 3), ("b", 2, 8), ("c", 0, 2))}
    assert [record.peer_id for record in chain_of(nodes)] == ["a", "b"]
    del nodes["b"]
    assert chain_of(nodes) == ()


def test_rows_of_an_earlier_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "hostile.json"
    monkeypatch.setattr("sys.argv", ["hostile", "--only", "rows_of_nan", "--out", str(out)])
    assert begun(parse())["rows"] == {}
    earlier = {"unread_pongs": row(GOOD, Limits())}
    out.write_text(json.dumps({"rows": earlier, "soak": {"ok": True}}))
    result = begun(parse())
    assert list(result["rows"]) == ["unread_pongs"]
    assert result["soak"] == {"ok": True}
    assert result["module"]


def test_a_summary_names_what_is_broken() -> None:
    rows = {
        "a": row(GOOD, Limits()),
        "b": row(replace(GOOD, gained=2, joined=False), Limits()),
    }
    assert summary(rows) == {"rows": 2, "ok": 1, "broken": {"b": ["joining", "gain"]}}


def test_the_document_has_a_line_for_each_row() -> None:
    sent = Sent(bytes=2_000_000).as_json()
    rows = {
        "one_attack": row(GOOD, Limits()) | {"sent": sent},
        "another": row(replace(GOOD, steered=3, escapes=1), Limits()) | {"sent": sent},
    }
    soak = {"minutes": 30, "attacks": {"one_attack": 3}, "failed": [], "answers": 7, "ended": []}
    soak["slope_mib_per_min"] = {"peer0": 0.25, "peer1": -0.1}
    soak["ttft_s"] = {"p50": 0.1, "p95": 0.3, "max": 4.0}
    soak["slope_error_mib_per_min"] = {"peer0": 0.04, "peer1": 0.02}
    result = {"limits": {field.name: getattr(Limits(), field.name) for field in fields(Limits)}}
    result |= {"cores": 2, "note": "", "rows": rows, "soak": soak}
    written = render("attacks", {"hostile": result}.__getitem__)
    assert "| one attack | 2.0 | 0 of 40 | 200 | 400 | 50 | 5 |  |" in written
    assert "| clients' plans, terminals |" in written
    assert "grew by at most 0.25 ± 0.04 MiB" in written
    assert set(CHECKS) == set(checks(GOOD, Limits()))


def test_an_attacker_says_in_one_line_what_it_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def knocks(target: Target) -> Sent:
        """Knocks until its time is over."""

        async def knock() -> None:
            target.sent.frames += 1
            raise NetworkError("closed")

        return await target.at_once([knock, knock])

    monkeypatch.setitem(ATTACKS, "knocks", Row(attack=knocks))
    monkeypatch.setattr("sys.argv", ["hostile", "--attack", "knocks", "--seconds", "0.5"])
    assert main() == 0
    sent = json.loads(capsys.readouterr().out)
    assert sent["frames"] == sent["refused"]["NetworkError"] >= 2


@pytest.mark.parametrize(("leaks", "slope"), [(0.0, 0.0), (2.0, 2.0)])
def test_memory_grows_where_its_least_does(leaks: float, slope: float) -> None:
    """Peaks that are given back are no growth, whenever they come."""
    rng = random.Random(1)
    samples = [
        (float(at), {"peer0": 100.0 + leaks * at / 60 + (at % 170 < 140) * rng.uniform(0, at)})
        for at in range(0, 1800, 5)
    ]
    assert growth_of(samples, 0.0, 1800.0)["peer0"].slope == pytest.approx(slope, abs=0.2)
