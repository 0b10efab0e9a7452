"""What chains are worth: their tokens/s under full load, and the speed of one answer. Pure."""

import math
from collections.abc import Sequence

from coordinator.evaluation.one_answer import AnswerTimes, tokens_per_s_for, worth
from coordinator.planning.search.chain_dp import Chain, Chains
from coordinator.planning.search.chain_judge import Judge
from dht.messages.types import Assignment


class Objective:
    """The worth of chains by the judge's workload (:attr:`Workload.answer_weight`)."""

    def __init__(self, judge: Judge) -> None:
        self.weight = judge.service.workload.answer_weight
        self.times = AnswerTimes(judge.problem, judge.service)
        self._judge = judge
        self._known_s: dict[Chain, float] = {}

    def __call__(self, chains: Chains, least: float = 0.0, near: Chains = ()) -> float:
        """The chains' worth, or any value below ``least`` once it is surely, or most probably,
        below that, also as far as those of ``near`` tell, of which they are a small change."""
        if not self.weight:
            return self._judge(chains, least, near)
        alone_s = self._answer_s(chains)
        served = self._judge(chains, tokens_per_s_for(least, alone_s, self.weight), near)
        return worth(served, alone_s, self.weight)

    def guess(self, chains: Chains) -> float:
        """About what the chains are worth, without the estimate."""
        served = self._judge.combined(chains, self._judge.guess)
        return worth(served, self._answer_s(chains), self.weight) if self.weight else served

    def _answer_s(self, chains: Chains) -> float:
        return min(map(self._alone_s, chains), default=math.inf)

    def _alone_s(self, chain: Chain) -> float:
        if chain not in self._known_s:
            self._known_s[chain] = _quickest_s(self.times, chain)
        return self._known_s[chain]


def _quickest_s(times: AnswerTimes, chain: Chain) -> float:
    """Seconds per token on the quickest ring over one peer of each stage."""
    by_span: dict[tuple[int, int], list[Assignment]] = {}
    for a in chain:
        by_span.setdefault((a.start, a.end), []).append(a)
    stages = [[a.peer_id for a in by_span[span]] for span in sorted(by_span)]
    run_s = {a.peer_id: times.stage_s(a.peer_id, a.end - a.start) for a in chain}
    return min(_from(times, stages, run_s, first) for first in stages[0])


def _from(
    times: AnswerTimes, stages: Sequence[Sequence[str]], run_s: dict[str, float], first: str
) -> float:
    """Seconds per token on the quickest ring that begins at ``first``."""
    come_s = {first: run_s[first]}
    for stage in stages[1:]:
        come_s = {
            head: run_s[head]
            + min(before_s + times.hop_s(tail, head) for tail, before_s in come_s.items())
            for head in stage
        }
    return min(before_s + times.closing_s(last, first) for last, before_s in come_s.items())
