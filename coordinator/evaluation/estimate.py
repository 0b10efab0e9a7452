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
"""Maximum fixed-point rounds for a peer's step; the search for X has at most twice as many."""
PRECISION = 1e-3
STEP_S_MAX = 100.0
"""Maximum time of a peer's step with decodes alone."""


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


@dataclass(slots=True)
class _Visit:
    """A peer on the flow: a token's mean visits, and the mean layers that it runs there."""

    machine: PeerSpeed
    decode: Curve
    """Decode times at the mean context of the workload's answers."""
    room: float
    stretch: float
    share: float
    layers: float = 0.0
    ending: float = 0.0
    """Share of the peer's tokens that go to the sink."""
    inbound: "list[_Wire]" = field(default_factory=list)
    outbound: "list[_Wire]" = field(default_factory=list)
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

    def ceiling(self, load: Workload) -> float:
        """A rate above which the peer could not keep up at any batch."""
        run = self.layers * self.stretch
        decodes = run * max(self.decode.at(256) / 256, 1e-9)
        prompts = (self.prompt_s + run * self.decode.at(1.0)) / load.output_tokens
        return 1.0 / (self.share * max(decodes, prompts)) if self.room > 0 else 0.0


def ceiling(problem: Problem, held: Assignment, service: Service) -> float:
    """A rate above which a peer could not keep up with tokens that pass all that it holds.

    So a stage of a chain serves at most the sum over its peers, however its flow is drawn.
    """
    visit = _visit(problem, held, service)
    visit.layers = held.end - held.start
    visit.settle(service.workload)
    return visit.ceiling(service.workload)


def _visit(problem: Problem, held: Assignment, service: Service, share: float = 1.0) -> _Visit:
    machine, load = service.machines[held.peer_id], service.workload
    stretch, count = machine.stretch, held.end - held.start
    return _Visit(
        machine=machine,
        decode=machine.decode.at_context(load.input_tokens + load.output_tokens / 2),
        room=machine.kv.of(held.start, held.end, problem.model.layers),
        stretch=stretch[min(count, len(stretch)) - 1] if stretch else 1.0,
        share=share,
    )


@dataclass(frozen=True, slots=True)
class _Wire:
    """A link on the flow, with what does not depend on the rate; times are in seconds.

    What waits for the link may wait for its sender's uplink or its receiver's downlink, which other
    links share: the station is the fullest of the three.
    """

    number: int
    tail: int
    """Number of the peer that sends; ``head``: of the one that receives."""
    head: int
    part: float
    """Share of the sender's tokens that take the link."""
    flow: float
    """A token's mean passes through the link."""
    busy: float
    """Share of the time in which the station is in use, per rate; ``inf`` if it carries nothing."""
    prompts_busy: float
    """The same, by prompts alone."""
    queue: float
    """Wait of a token behind other tokens, per rate, at a station with little to do."""
    slow_s: float
    """Mean time at the station of the prompt ahead of a token: a token meets long ones more
    often."""
    token_s: float
    """Time of a token that does not wait, with the overhead at both ends."""
    prompt_s: float
    """The same of a prompt of mean length."""


NOTHING = Estimate(tokens_per_s=0.0, token_time_s=0.0, prompt_time_s=0.0, requests=0.0)


def estimate(
    problem: Problem,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge],
    service: Service,
    least: float = 0.0,
) -> Estimate:
    """The estimate for a placement whose routes are drawn along ``edges``.

    Parts of the flow that share no peer are estimated separately and added. Of a single part that
    would serve less than ``least`` tokens/s, nothing more is found out.
    """
    held = {a.peer_id: a for a in assignments}
    parts = separate_parts(flow_shares(edges))
    least = least if len(parts) == 1 else 0.0
    return added([_estimate_part(problem, held, part, service, least) for part in parts])


def added(found: Sequence[Estimate]) -> Estimate:
    """The estimate of parts of a flow that share no peer."""
    total = sum(part.tokens_per_s for part in found)
    if total <= 0:
        return NOTHING
    return Estimate(
        tokens_per_s=total,
        token_time_s=sum(p.tokens_per_s * p.token_time_s for p in found) / total,
        prompt_time_s=sum(p.tokens_per_s * p.prompt_time_s for p in found) / total,
        requests=sum(p.requests for p in found),
    )


def _estimate_part(
    problem: Problem,
    held: Mapping[str, Assignment],
    part: Shares,
    service: Service,
    least: float,
) -> Estimate:
    """The largest rate at which the requests in flight fit.

    By false position: what is fullest fills about as a power of the rate.
    """
    network = _Network(problem, held, part, service)
    low, high = 0.0, network.ceiling()
    if high <= least:
        return NOTHING
    under, over = 0.0, 1.0  # what is fullest at ``low`` and at ``high``
    best: _State | None = None
    rate, widths = least or high / 2, [high, high]
    for _ in range(2 * ROUNDS):
        tried = network.at(rate)
        if tried.load < 1:
            low, under, best = rate, tried.load, tried
        elif rate == least:
            return NOTHING
        else:
            high, over = rate, tried.load
        widths.append(high - low)
        if widths[-1] < PRECISION * high:
            break
        if under > 0 and math.isfinite(over):
            power = math.log(over / under) / math.log(high / low)
            rate = low * under ** (-1 / power)
        else:
            rate = high / over
        # The next guess falls to the side that was not tried last, so that both ends come near.
        near = PRECISION / 3
        rate *= 1 + near if tried.load < 1 else 1 - near
        rate = min(max(rate, low * (1 + near)), high * (1 - near))
        if widths[-1] > widths[-3] / 2:
            rate = (low + high) / 2
    best = best or network.at(network.ceiling() * 1e-6)
    return Estimate(
        tokens_per_s=low,
        token_time_s=best.token_s,
        prompt_time_s=best.prompt_s,
        requests=low * (best.token_s + best.prompt_s / service.workload.output_tokens),
    )


@dataclass(frozen=True, slots=True)
class _State:
    load: float
    """What is fullest at the rate: a peer's time or KV room, a link, or the requests; at 1 and
    above, the rate does not fit."""
    token_s: float = 0.0
    prompt_s: float = 0.0


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
        self._workload = load = service.workload
        self._spread = 1 + (load.input_deviation / load.input_tokens) ** 2
        order = topological(kept, held)
        share = {SOURCE: 1.0}
        for name in (SOURCE, *order):
            for head, part in kept.get(name, {}).items():
                share[head] = share.get(head, 0.0) + share[name] * part
        visits: dict[str, _Visit] = {}
        for name in order:
            visits[name] = _visit(problem, held[name], service, share[name])
            visits[name].ending = kept.get(name, {}).get(SINK, 0.0)
        pairs: list[tuple[str, str, float]] = []
        for tail, heads in kept.items():
            for head, part in heads.items():
                flow = share.get(tail, 0.0) * part
                if head == SINK or head not in visits or flow <= 0:
                    continue
                begin = 0 if tail == SOURCE else held[tail].end
                visits[head].layers += flow * (held[head].end - begin)
                if tail != SOURCE:
                    pairs.append((tail, head, part))
        self._links = 0
        self._wires(visits, pairs)
        self.visits = tuple(visits.values())
        for visit in self.visits:
            visit.settle(load)
        self._closing_s = self._closing(visits, kept.get(SOURCE, {}), service.hub_delay_s)

    def _wires(self, visits: Mapping[str, _Visit], pairs: Sequence[tuple[str, str, float]]) -> None:
        """Set the links, from their ends and the shares of the senders' tokens."""
        problem = self._problem
        bandwidth, rtts = bandwidth_bytes_per_s(problem), round_trips_s(problem)
        own = own_rates_bytes_per_s(problem)
        number = {name: index for index, name in enumerate(visits)}
        flows = [visits[tail].share * part for tail, _, part in pairs]
        sent: dict[str, float] = {}
        taken: dict[str, float] = {}
        for (tail, head, _), flow in zip(pairs, flows, strict=True) if own else ():
            sent[tail] = sent.get(tail, 0.0) + flow
            taken[head] = taken.get(head, 0.0) + flow
        for (tail, head, part), flow in zip(pairs, flows, strict=True):
            stations = [(flow, bandwidth(tail, head))]
            if tail in own:
                stations.append((sent[tail], own[tail][0]))
            if head in own:
                stations.append((taken[head], own[head][1]))
            delay_s = rtts.get((tail, head), problem.default_rtt_s) / 2
            ends = self._links, number[tail], number[head]
            self._links += 1
            overhead_s = problem.model.activation_bytes * visits[head].machine.overhead_s_per_byte
            wire = self._wire(ends, part, flow, stations, delay_s, overhead_s)
            visits[head].inbound.append(wire)
            visits[tail].outbound.append(wire)

    def _wire(
        self,
        ends: tuple[int, int, int],
        part: float,
        flow: float,
        stations: Sequence[tuple[float, float]],
        delay_s: float,
        overhead_s: float,
    ) -> _Wire:
        """A link, from its number and ends, and the flow and the bytes/s of what it passes."""
        load, activation_bytes = self._workload, self._problem.model.activation_bytes
        narrowest = min(rate for _, rate in stations)
        through, fullest = max(
            stations, key=lambda each: each[0] / each[1] if each[1] else math.inf
        )
        each_s = activation_bytes / fullest if fullest > 0 else 0.0
        # Bytes pass all stations at once: the narrowest sets how long that takes.
        alone_s = activation_bytes / narrowest if narrowest > 0 else 0.0
        long_s = each_s * load.input_tokens
        prompts_busy = through * long_s / load.output_tokens
        return _Wire(
            *ends,
            part=part,
            flow=flow,
            busy=through * each_s + prompts_busy if narrowest > 0 else math.inf,
            prompts_busy=prompts_busy,
            queue=through * each_s * each_s / 2,
            slow_s=long_s * self._spread,
            token_s=delay_s + alone_s + overhead_s,
            prompt_s=delay_s + (alone_s + overhead_s) * load.input_tokens,
        )

    def _closing(
        self,
        visits: Mapping[str, _Visit],
        firsts: Mapping[str, float],
        hub: Mapping[str, float],
    ) -> float:
        """Mean seconds from the last stage back to the first, over all pairs of both."""
        rtts, default_s = round_trips_s(self._problem), self._problem.default_rtt_s
        total = 0.0
        for name, visit in visits.items():
            ending = visit.share * visit.ending
            if not ending:
                continue
            for first, part in firsts.items():
                if name in hub and first in hub:
                    total += ending * part * (hub[name] + hub[first])
                elif first != name:
                    total += ending * part * rtts.get((name, first), default_s) / 2
        return total

    def ceiling(self) -> float:
        """A rate above which some peer or link could not keep up."""
        busiest = max((wire.busy for visit in self.visits for wire in visit.inbound), default=0.0)
        peers = min(visit.ceiling(self._workload) for visit in self.visits)
        return min(peers, 1 / busiest) if busiest else peers

    def at(self, rate: float) -> _State:
        """Times at ``rate`` decoded tokens/s, and what is fullest then."""
        load, closing_s = self._workload, self._closing_s
        prompts = rate / load.output_tokens
        fullest = ends_token_s = ends_prompt_s = 0.0
        hops = [(0.0, 0.0)] * self._links
        steps: list[tuple[float, float]] = []
        behind: list[float] = []
        up: list[tuple[float, float]] = []  # mean seconds from the source to each peer's end
        for visit in self.visits:
            carried = token = prompt = 0.0
            for wire in visit.inbound:
                busy = rate * wire.busy
                if busy >= 1:
                    return _State(load=busy)
                fullest = busy if busy > fullest else fullest
                # The prompt ahead of a token takes the token's link with probability ``part``.
                hop, caught = _hop(wire, rate, busy, wire.part * behind[wire.tail])
                hops[wire.number], before, flow = hop, up[wire.tail], wire.flow
                carried += flow * caught
                token += flow * (before[0] + hop[0])
                prompt += flow * (before[1] + hop[1])
            share = visit.share
            step, caught, busy = self._step(visit, rate * share, prompts * share, carried / share)
            if busy >= 1:
                return _State(load=busy)
            fullest = busy if busy > fullest else fullest
            steps.append(step)
            behind.append(caught)
            token, prompt = token / share + step[0], prompt / share + step[1]
            up.append((token, prompt))
            ends_token_s += share * visit.ending * token
            ends_prompt_s += share * visit.ending * prompt
        token_s = ends_token_s + closing_s
        requests = rate * (token_s + ends_prompt_s / load.output_tokens)
        fullest = max(fullest, requests / load.requests_max)
        return _State(
            load=max(fullest, self._fullest_room(rate, steps, hops, up)),
            token_s=token_s,
            prompt_s=ends_prompt_s,
        )

    def _fullest_room(
        self,
        rate: float,
        steps: Sequence[tuple[float, float]],
        hops: Sequence[tuple[float, float]],
        up: Sequence[tuple[float, float]],
    ) -> float:
        """The largest share of a peer's KV room that the requests in flight take."""
        load, closing_s = self._workload, self._closing_s
        length = (load.input_tokens + load.reserve_tokens) / load.kv_high_water
        fullest = 0.0
        down = [(0.0, 0.0)] * len(steps)  # mean seconds from each peer's end to the sink
        for index in range(len(steps) - 1, -1, -1):
            visit = self.visits[index]
            token = prompt = 0.0
            for wire in visit.outbound:
                hop, step, after = hops[wire.number], steps[wire.head], down[wire.head]
                token += wire.part * (hop[0] + step[0] + after[0])
                prompt += wire.part * (hop[1] + step[1] + after[1])
            down[index] = token, prompt
            token += up[index][0] + closing_s
            prompt += up[index][1]
            here = rate * visit.share * (token + prompt / load.output_tokens)
            needed = here * visit.layers * length
            if needed > fullest * visit.room:
                fullest = needed / visit.room if visit.room > 0 else math.inf
        return fullest

    def _step(
        self, visit: _Visit, decodes: float, prompts: float, carried: float
    ) -> tuple[tuple[float, float], float, float]:
        """Seconds of (a token, a prompt) at a peer; the share of tokens that leave behind a prompt;
        the share of the time in which prompts are run, 1 or more where the peer cannot keep up.

        A peer runs all that waits as one batch, then looks again; it idles only while nothing
        waits. A step with a prompt is long, and a token caught behind a prompt stays behind it at
        every later peer that both visit: ``carried`` is the share of tokens that arrive behind one.
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
            if busy >= 1 or plain > STEP_S_MAX:
                return (0.0, 0.0), 0.0, max(busy, plain / STEP_S_MAX)
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
        return (token, prompt), caught, busy


def _hop(
    link: _Wire, rate: float, busy: float, carried: float
) -> tuple[tuple[float, float], float]:
    """Seconds of (a token, a prompt) on a link; the share of tokens that leave behind a prompt.

    The link carries one message at a time and is ``busy`` for a share of the time. ``carried`` is
    the share of tokens that arrive behind a prompt.
    """
    prompts, slow_s = rate * link.prompts_busy, link.slow_s
    newly = (1 - carried) * prompts
    token = (carried + newly / 2) * slow_s + rate * link.queue / (1 - busy) + link.token_s
    prompt = prompts * slow_s / (2 * (1 - busy)) + link.prompt_s
    return (token, prompt), carried + newly
