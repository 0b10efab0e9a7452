"""Estimates what a plan would serve, tokens/s and the time of a token, in milliseconds.

Max flow is what every peer could carry at the batch that its T_j assumes. A closed swarm reaches
that batch only if KV room admits enough requests and the ring is short enough. So the estimate is
the largest rate X at which the requests in flight, X × (time of a token + time of a prompt / tokens
of an answer), still fit the KV room of every peer. The time of a token is a sum along the plan's
flow: the wait and work of a step at each peer, with the batch that X brings there, and the wait and
transfer on each link, with prompts between the tokens. The method is mean-value analysis of a
closed network (Reiser and Lavenberg, 1980) with batch service; T_l(batch) comes from measured
profiles.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.evaluation.flow_shares import Shares, flow_shares, separate_parts, topological
from coordinator.evaluation.max_flow import (
    bandwidth_bytes_per_s,
    own_rates_bytes_per_s,
    round_trips_s,
)
from coordinator.problem.service import Curve, PeerSpeed, Service, Workload
from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, Problem

ROUNDS = 12
"""Maximum fixed-point rounds for a peer's step; the bisection on X has at most twice as many."""
PRECISION = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan would serve under a load."""

    tokens_per_s: float
    """Throughput in decoded tokens."""
    token_time_s: float
    """Time from one token of a session to its next."""
    prompt_time_s: float
    """Time from the prompt's start to the first token."""
    requests: float
    """Number of sessions in flight."""
    bottleneck: str = ""
    """The limit: a peer with full KV room, a peer or link that is always busy, or ``requests``."""


@dataclass(slots=True)
class _Visit:
    """A peer on the flow: a token's mean visits, and the mean layers that it runs there."""

    machine: PeerSpeed
    decode: Curve
    """Decode times at the mean context of the workload's answers."""
    room: float
    stretch: float
    share: float = 0.0
    layers: float = 0.0
    inbound: list[tuple[str, float, float]] = field(default_factory=list)
    prompt_s: float = 0.0
    """Time of a step with one prompt of mean length and nothing else."""
    alone_s: float = 0.0
    """Time of a step with one decode."""

    def settle(self, load: Workload) -> None:
        """Compute the times that do not depend on the rate; needs ``share`` and ``layers``."""
        machine = self.machine
        self.layers /= max(self.share, 1e-12)
        run = self.layers * self.stretch
        self.prompt_s = run * machine.prompt.at(load.input_tokens) + machine.step_overhead_s
        self.alone_s = run * self.decode.at(1.0) + machine.step_overhead_s


@dataclass(frozen=True, slots=True)
class _Wire:
    """A link on the flow, with the times that do not depend on the rate, in seconds.

    What waits for the link may wait for its sender's uplink or its receiver's downlink, which other
    links share: the station is the fullest of the three.
    """

    flow: float
    """A token's mean passes through the station."""
    carries: bool
    """Whether the link carries anything."""
    delay_s: float
    """Time on the way of a token that does not wait, beyond ``each_s``."""
    prompt_delay_s: float
    """The same of a prompt of mean length, beyond ``long_s``."""
    each_s: float
    """Time of a token at the station."""
    long_s: float
    """Time of a prompt of mean length at the station."""
    slow_s: float
    """Mean time there of the prompt ahead of a token: a token meets long ones more often."""
    extra_s: float
    """Overhead per token at both ends."""


NOTHING = Estimate(tokens_per_s=0.0, token_time_s=0.0, prompt_time_s=0.0, requests=0.0)


def serves(
    problem: Problem,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge],
    service: Service,
    tokens_per_s: float,
) -> bool:
    """Whether the flow would serve ``tokens_per_s``: one evaluation, not a search.

    True without a check where the flow has several parts.
    """
    parts = separate_parts(flow_shares(edges))
    held = {a.peer_id: a for a in assignments}
    return len(parts) != 1 or _Network(problem, held, parts[0], service).at(tokens_per_s).fits


def estimate(
    problem: Problem,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge],
    service: Service,
) -> Estimate:
    """The estimate for a placement whose routes are drawn along ``edges``.

    Parts of the flow that share no peer are estimated separately and added.
    """
    held = {a.peer_id: a for a in assignments}
    found = [
        _estimate_part(problem, held, part, service) for part in separate_parts(flow_shares(edges))
    ]
    total = sum(part.tokens_per_s for part in found)
    if total <= 0:
        return NOTHING
    slowest = min(found, key=lambda part: (part.tokens_per_s, part.bottleneck))
    return Estimate(
        tokens_per_s=total,
        token_time_s=sum(p.tokens_per_s * p.token_time_s for p in found) / total,
        prompt_time_s=sum(p.tokens_per_s * p.prompt_time_s for p in found) / total,
        requests=sum(p.requests for p in found),
        bottleneck=slowest.bottleneck,
    )


def _estimate_part(
    problem: Problem, held: Mapping[str, Assignment], part: Shares, service: Service
) -> Estimate:
    """The largest rate at which the requests in flight fit, by bisection."""
    network = _Network(problem, held, part, service)
    low, high = 0.0, network.ceiling()
    best: _State | None = None
    limit = ""
    for _ in range(2 * ROUNDS):
        rate = (low + high) / 2
        tried = network.at(rate)
        if tried.fits:
            low, best = rate, tried
        else:
            high, limit = rate, tried.limit
        if high - low < PRECISION * high:
            break
    best = best or network.at(network.ceiling() * 1e-6)
    return Estimate(
        tokens_per_s=low,
        token_time_s=best.token_s,
        prompt_time_s=best.prompt_s,
        requests=low * (best.token_s + best.prompt_s / service.workload.output_tokens),
        bottleneck=limit,
    )


@dataclass(frozen=True, slots=True)
class _State:
    fits: bool
    token_s: float = 0.0
    prompt_s: float = 0.0
    limit: str = ""


class _Network:
    """The part of a plan's flow that routes are drawn from, as a network of queues."""

    def __init__(
        self,
        problem: Problem,
        held: Mapping[str, Assignment],
        kept: Shares,
        service: Service,
    ) -> None:
        self._problem = problem
        self._workload = service.workload
        machines = service.machines
        self.order = topological(kept, held)
        self.visits: dict[str, _Visit] = {}
        self.links: dict[tuple[str, str], _Wire] = {}
        load = service.workload
        self._spread = 1 + (load.input_deviation / load.input_tokens) ** 2
        share = {SOURCE: 1.0}
        for name in (SOURCE, *self.order):
            for head, part in kept.get(name, {}).items():
                share[head] = share.get(head, 0.0) + share[name] * part
        for name in self.order:
            a, machine = held[name], machines[name]
            count = a.end - a.start
            self.visits[name] = _Visit(
                machine=machine,
                decode=machine.decode.at_context(load.input_tokens + load.output_tokens / 2),
                room=machine.kv.of(a.start, a.end, problem.model.layers),
                stretch=machine.stretch[min(count, len(machine.stretch)) - 1]
                if machine.stretch
                else 1.0,
                share=share[name],
            )
        pairs: list[tuple[str, str, float]] = []
        for tail, heads in kept.items():
            for head, part in heads.items():
                flow = share.get(tail, 0.0) * part
                if head == SINK or head not in self.visits or flow <= 0:
                    continue
                begin = 0 if tail == SOURCE else held[tail].end
                visit = self.visits[head]
                visit.layers += flow * (held[head].end - begin)
                visit.inbound.append((tail, part, flow))
                if tail != SOURCE:
                    pairs.append((tail, head, flow))
        self._wires(pairs)
        for visit in self.visits.values():
            visit.settle(load)
        self._kept = kept
        self._closing_s = self._closing(round_trips_s(problem), service.hub_delay_s)

    def _wires(self, pairs: Sequence[tuple[str, str, float]]) -> None:
        """Set the links, from their ends and flows."""
        problem = self._problem
        bandwidth, rtts = bandwidth_bytes_per_s(problem), round_trips_s(problem)
        own = own_rates_bytes_per_s(problem)
        sent: dict[str, float] = {}
        taken: dict[str, float] = {}
        for tail, head, flow in pairs if own else ():
            sent[tail] = sent.get(tail, 0.0) + flow
            taken[head] = taken.get(head, 0.0) + flow
        for tail, head, flow in pairs:
            stations = [(flow, bandwidth(tail, head))]
            if tail in own:
                stations.append((sent[tail], own[tail][0]))
            if head in own:
                stations.append((taken[head], own[head][1]))
            delay_s = rtts.get((tail, head), problem.default_rtt_s) / 2
            self.links[tail, head] = self._wire(head, stations, delay_s)

    def _wire(self, head: str, stations: Sequence[tuple[float, float]], delay_s: float) -> _Wire:
        """A link to ``head``, from the flow and the bytes/s of what it passes."""
        load, activation_bytes = self._workload, self._problem.model.activation_bytes
        narrowest = min(rate for _, rate in stations)
        flow, fullest = max(stations, key=lambda each: each[0] / each[1] if each[1] else math.inf)
        each_s = activation_bytes / fullest if fullest > 0 else 0.0
        # Bytes pass all stations at once: the narrowest sets how long that takes.
        rest_s = activation_bytes / narrowest - each_s if narrowest > 0 else 0.0
        long_s = each_s * load.input_tokens
        return _Wire(
            flow=flow,
            carries=narrowest > 0,
            delay_s=delay_s + rest_s,
            prompt_delay_s=delay_s + rest_s * load.input_tokens,
            each_s=each_s,
            long_s=long_s,
            slow_s=long_s * self._spread,
            extra_s=activation_bytes * self.visits[head].machine.overhead_s_per_byte,
        )

    def _closing(self, rtts: Mapping[tuple[str, str], float], hub: Mapping[str, float]) -> float:
        """Mean seconds from the last stage back to the first, over all pairs of both."""
        default_s = self._problem.default_rtt_s
        firsts = self._kept.get(SOURCE, {})
        total = 0.0
        for name in self.order:
            ending = self.visits[name].share * self._kept.get(name, {}).get(SINK, 0.0)
            for first, part in firsts.items():
                if name in hub and first in hub:
                    total += ending * part * (hub[name] + hub[first])
                elif first != name:
                    total += ending * part * rtts.get((name, first), default_s) / 2
        return total

    def ceiling(self) -> float:
        """A rate above which some peer could not keep up at any batch."""
        return min(
            1.0
            / (visit.share * visit.layers * visit.stretch * max(visit.decode.at(256) / 256, 1e-9))
            for visit in self.visits.values()
        )

    def at(self, rate: float) -> _State:
        """Times at ``rate`` decoded tokens/s, and whether KV room holds the requests in flight."""
        load = self._workload
        prompts = rate / load.output_tokens
        hops: dict[tuple[str, str], tuple[float, float]] = {}
        steps: dict[str, tuple[float, float]] = {}
        behind: dict[str, float] = {}
        for name in self.order:
            visit = self.visits[name]
            carried = 0.0
            for tail, part, flow in visit.inbound:
                if tail == SOURCE:
                    continue
                # The prompt ahead of a token takes the token's link with probability ``part``.
                hop = self._hop((tail, name), rate, part * behind[tail])
                if hop is None:
                    return _State(fits=False, limit=f"{tail} to {name}")
                hops[tail, name], caught = hop
                carried += flow * caught / visit.share
            step = self._step(visit, rate * visit.share, prompts * visit.share, carried)
            if step is None:
                return _State(fits=False, limit=name)
            steps[name], behind[name] = step
        up, down = self._sums(steps, hops)
        token_s = up[SINK][0] + self._closing_s
        prompt_s = up[SINK][1]
        length = load.input_tokens + load.reserve_tokens
        if rate * (token_s + prompt_s / load.output_tokens) > load.requests_max:
            return _State(fits=False, limit="requests")
        for name, visit in self.visits.items():
            token = up[name][0] + down[name][0] + self._closing_s
            prompt = up[name][1] + down[name][1]
            here = rate * visit.share * (token + prompt / load.output_tokens)
            if here * visit.layers * length > load.kv_high_water * visit.room:
                return _State(fits=False, limit=name)
        return _State(fits=True, token_s=token_s, prompt_s=prompt_s)

    def _hop(
        self, pair: tuple[str, str], rate: float, carried: float
    ) -> tuple[tuple[float, float], float] | None:
        """Seconds of (a token, a prompt) on a link; the share of tokens that leave behind a prompt.

        The link carries one message at a time. ``carried`` is the share of tokens that arrive
        behind a prompt. None where the link cannot carry the rate.
        """
        link, load = self.links[pair], self._workload
        if not link.carries:
            return None
        each, long, slow, extra = link.each_s, link.long_s, link.slow_s, link.extra_s
        decodes = rate * link.flow
        prompts = decodes / load.output_tokens
        busy = decodes * each + prompts * long
        if busy >= 1:
            return None
        newly = (1 - carried) * prompts * long
        queue = decodes * each * each / (2 * (1 - busy))
        token = carried * slow + newly * slow / 2 + queue + each + link.delay_s + extra
        prompt = prompts * long * slow / (2 * (1 - busy)) + long + link.prompt_delay_s
        return (token, prompt + extra * load.input_tokens), carried + newly

    def _sums(
        self,
        steps: Mapping[str, tuple[float, float]],
        hops: Mapping[tuple[str, str], tuple[float, float]],
    ) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
        """Mean seconds of (token, prompt) from the source to each peer's end, then to the sink."""
        up: dict[str, tuple[float, float]] = {SOURCE: (0.0, 0.0)}
        ends = [0.0, 0.0]
        for name in self.order:
            visit, mine = self.visits[name], steps[name]
            token = prompt = 0.0
            for tail, _, flow in visit.inbound:
                before, hop = up[tail], hops.get((tail, name), (0.0, 0.0))
                token += flow * (before[0] + hop[0])
                prompt += flow * (before[1] + hop[1])
            share = max(visit.share, 1e-12)
            token, prompt = token / share + mine[0], prompt / share + mine[1]
            up[name] = token, prompt
            ending = visit.share * self._kept.get(name, {}).get(SINK, 0.0)
            ends[0] += ending * token
            ends[1] += ending * prompt
        up[SINK] = (ends[0], ends[1])
        down: dict[str, tuple[float, float]] = {}
        for name in reversed(self.order):
            token = prompt = 0.0
            for head, part in self._kept.get(name, {}).items():
                if head == SINK:
                    continue
                hop, step, after = hops[name, head], steps[head], down[head]
                token += part * (hop[0] + step[0] + after[0])
                prompt += part * (hop[1] + step[1] + after[1])
            down[name] = token, prompt
        return up, down

    def _step(
        self, visit: _Visit, decodes: float, prompts: float, carried: float
    ) -> tuple[tuple[float, float], float] | None:
        """Seconds of (a token, a prompt) at a peer; the share of tokens that leave behind a prompt.

        A peer runs all that waits as one batch, then looks again; it idles only while nothing
        waits. A step with a prompt is long, and a token caught behind a prompt stays behind it at
        every later peer that both visit: ``carried`` is the share of tokens that arrive behind one.
        None where the peer cannot keep up.
        """
        # The search spends most of its time here, hence comparisons instead of min() and max().
        layers, decode_s = visit.layers * visit.stretch, visit.decode.at
        overhead_s, answer_tokens = visit.machine.step_overhead_s, self._workload.output_tokens
        prompt_s, plain = visit.prompt_s, visit.alone_s
        caught, laden, busy = carried, prompt_s, 0.0
        for _ in range(ROUNDS):
            before = plain + laden
            free = decodes * (1 - caught)
            during = free * plain
            idle = math.exp(-during if during < 50.0 else -50.0) / (free if free > 1e-9 else 1e-9)
            batch = free * (plain + idle)
            plain = layers * decode_s(batch if batch > 1.0 else 1.0) + overhead_s
            batch = answer_tokens * caught
            laden = prompt_s + layers * decode_s(batch if batch > 1.0 else 1.0)
            busy = prompts * laden
            if busy >= 1 or plain > 100.0:
                return None
            newly = busy - prompts * plain
            caught = carried
            if newly > 0.0:
                caught += (1 - carried) * (newly if newly < 1.0 else 1.0)
            if abs(plain + laden - before) < PRECISION * before:
                break
        slow = laden * self._spread
        residual = plain / 2 * min(1.0, free * plain)
        newly = caught - carried
        token = (1 - caught) * (residual + plain) + carried * slow + newly * (slow / 2 + plain)
        prompt = residual + laden + busy * slow / (2 * (1 - busy))
        return (token, prompt), caught
