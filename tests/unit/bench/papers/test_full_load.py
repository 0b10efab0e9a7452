"""Papers' rules on paper: full load, given load, and which rules go together."""

import pytest

from bench.papers.full_load import HELIX, OURS, SCHEDULERS, PaperRules, offline, online
from bench.papers.simulate import main
from coordinator.commands import full_load
from coordinator.commands.full_load import LIVING, Rules
from coordinator.simulator.core.trace import typical
from dht.errors import UserError
from tests.unit.coordinator.simulator.toy import poisson, saturated

HUB = Rules(hub=True, chunk_tokens=None)


def test_full_load_fills_the_peers_and_never_their_kv() -> None:
    problem, profiles, held, _ = saturated()
    report = offline(
        problem,
        profiles,
        held,
        typical(),
        HELIX,
        seed=3,
        warm_up_s=10.0,
        measured_s=30.0,
        first_requests=5,
    )
    assert report.decode_tokens_per_s > 0
    assert max(use.busy for use in report.peers.values()) > 0.7
    # The scheduler bounds expected lengths, not real ones: a few long answers may go beyond.
    assert all(use.kv_peak <= 1.05 for use in report.peers.values())
    # Little's law for decodes: at most one per session is under way, and the room bounds sessions.
    under_way = report.decode_tokens_per_s * report.decode.mean_s
    assert under_way <= 400_000 / (4 * 244)
    assert report.decode.count == round(report.decode_tokens_per_s * report.measured_s)


@pytest.mark.parametrize(
    "rules",
    [
        PaperRules(scheduler="helix", living=HUB),
        *(PaperRules(scheduler=each) for each in SCHEDULERS),
    ],
)
def test_all_that_arrives_is_served_by_all_rules(rules: PaperRules) -> None:
    problem, profiles, held, _ = saturated()
    arrivals = poisson(typical(), per_s=1.0, duration_s=20.0, seed=5)
    report = online(problem, profiles, held, arrivals, rules, measured_s=20.0)
    assert report.sessions_done == report.sessions_opened == len(arrivals)
    assert all(use.kv_peak <= 1 for use in report.peers.values())


def test_the_living_rules_are_the_products() -> None:
    problem, profiles, held, config = saturated()
    found = offline(
        problem, profiles, held, typical(), OURS, seed=3, warm_up_s=10.0, measured_s=30.0
    )
    assert found == full_load.offline(problem, profiles, held, typical(), config)


@pytest.mark.parametrize(
    ("scheduler", "living"),
    [(None, None), ("anabranch", None), ("best", None), ("swarm", LIVING), ("in-turn", LIVING)],
)
def test_rules_that_do_not_go_together_are_refused(
    scheduler: str | None, living: Rules | None
) -> None:
    with pytest.raises(UserError):
        PaperRules(scheduler=scheduler, living=living)


CLUSTER = "bench/data/helix/clusters/small10.json"


@pytest.mark.parametrize(
    "rules", [(), ("--scheduler", "helix"), ("--scheduler", "swarm", "--as-in-papers")]
)
def test_the_command_simulates_by_papers_rules(
    capsys: pytest.CaptureFixture[str], rules: tuple[str, ...]
) -> None:
    quick = ("--model", "30b", "--placement", "chain", "--warm-up", "1", "--duration", "9")
    assert main([CLUSTER, *quick, *rules]) == 0
    assert "tokens/s decoded" in capsys.readouterr().out


def test_the_command_refuses_rules_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([CLUSTER, "--model", "30b", "--as-in-papers"]) == 2
    assert "anabranch" in capsys.readouterr().err.splitlines()[-1]
