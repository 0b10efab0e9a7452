"""Estimates what a plan would serve, tokens/s and the time of a token, in milliseconds.

Max flow is what every peer could carry at the batch that its T_j assumes. A closed swarm reaches
that batch only if KV room admits enough requests and the ring is short enough. So the estimate is
the largest rate X at which the requests in flight, X × (time of a token + time of a prompt / tokens
of an answer), still fit the KV room of every layer. The time of a token is a sum along the plan's
flow: the wait and work of a step at each peer, with the batch that X brings there, and the wait and
transfer on each link. The rules are those that peers follow: prompts come in chunks, a chunk shares
its step with the decodes that wait (:mod:`coordinator.policies.batching.scheduler`), and on a link
decodes overtake prompts (:mod:`coordinator.policies.links.scheduler`). The method is mean-value
analysis of a closed network (Reiser and Lavenberg, 1980) with batch service; T_l(batch) comes from
measured profiles. Tests hold it against the simulator.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from coordinator.evaluation.flow_shares import (
    Shares,
    flow_shares,
    mean_visits,
    separate_parts,
    topological,
    within_room,
)
from coordinator.evaluation.max_flow import (
    bandwidth_bytes_per_s,
    own_rates_bytes_per_s,
    round_trips_s,
)
from coordinator.evaluation.shared_uplinks import Way, kept_shares, shared_uplinks
from coordinator.policies.admission.config import ADMISSION
from coordinator.policies.batching.scheduler import LIMIT_ROWS, limits_of
from coordinator.policies.links.chunk_sizer import ChunkSizer
from coordinator.policies.links.scheduler import LinkConfig
from coordinator.problem.service import Curve, PeerSpeed, Service, Workload
from dht.messages.types import SINK, SOURCE, Assignment, FlowEdge, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateConfig:
    """How long the estimate iterates, and what it assumes of steps and KV."""

    rounds: int = 12
    """Maximum fixed-point rounds for a peer's step; the search for X has at most twice as many."""
    precision: float = 1e-3
    over_max: float = 0.05
    """Most that the logarithm of what is fullest counts where a rate does not fit: it rises without
    bounds just beyond the rate that is sought. With 1.0, a fifth more rates were tried."""
    step_s_max: float = 100.0
    """Maximum time of a peer's step with decodes alone."""
    decodes_most: int = 256
    """Decodes of the largest step, in which one takes least time."""
    curves_max: int = 4096
    """Maximum peers whose bound is remembered."""
    left_over: float = 0.5
    """KV that stays free because the next request needs more, in requests."""
    fewer: float = 0.8
    """Ratio of the requests in flight that are tried to those tried before."""
    worse_max: int = 2
    """Numbers of requests in a row that serve less, after which no fewer are tried."""


ESTIMATE = EstimateConfig()


SLICE_S = LinkConfig().frame_us / 1e6
"""Time of the slice of a prompt that a decode may find on a link."""


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


@dataclass(slots=True, kw_only=True)
class _Visit:
    """A peer on the flow, with what does not depend on the rate; times are in seconds."""

    layers_max: int
    """Maximum layers that the peer can hold, which bound a step's prefill rows."""
    decode: Curve
    """Time of a layer by decodes, at the mean context of the workload's answers."""
    prompt: Curve
    """Time of a layer by rows of a prompt's chunk."""
    overhead_s: float
    """Time of a step beside its layers."""
    stretch: float
    share: float
    """A token's mean visits."""
    ending: float
    """Share of the peer's tokens that go to the sink."""
    run: float = 0.0
    """Mean layers that a token runs here, times the stretch."""
    inbound: "list[_Wire]" = field(default_factory=list)
    chunk_s: float = 0.0
    """Time that a chunk of a prompt adds to a step."""
    chunks_max: float = 1.0
    """Maximum chunks of a step."""

    @property
    def alone_s(self) -> float:
        """Time of a step with one decode."""
        return self.run * self.decode.at(1.0) + self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wire:
    """A link on the flow, with what does not depend on the rate; times are in seconds.

    What waits for the link may wait for its sender's uplink or its receiver's downlink, which other
    links share, also those of other peers: the station is the fullest of them.
    """

    tail: int
    """Number of the peer that sends."""
    part: float
    """Share of the sender's tokens that take the link."""
    flow: float
    """A token's mean passes through the link."""
    decodes_busy: float
    """Share of the time in which decodes use the station, per rate; ``inf`` if it carries
    nothing."""
    prompts_busy: float
    """The same of prompts."""
    each_s: float
    """Time of a row at the station."""
    slow_s: float
    """Mean time there of a prompt that is under way: a long one is met more often."""
    row_s: float
    """Time of a row that does not wait, with the overhead at both ends."""
    delay_s: float
    """Time on the way."""


NOTHING = Estimate(tokens_per_s=0.0, token_time_s=0.0, prompt_time_s=0.0, requests=0.0)


def ceiling(held: Assignment, service: Service) -> float:
    """A rate above which a peer could not keep up with tokens that pass all that it holds.

    So a stage of a chain serves at most the sum over its peers, however its flow is drawn.
    """
    machine = service.machines[held.peer_id]
    layers = held.end - held.start
    run = layers * machine.stretch_of(layers)
    return 1 / max(run * layer_token_s(machine, service.workload), 1e-12)


def chains_bound(problem: Problem, service: Service) -> float:
    """Tokens/s that no placement of chains can exceed by the estimate.

    Each layer of a chain is held by peers whose ceilings add up to the chain's rate at least, and
    whose KV room takes the chain's sessions: by Little's law the rate times the time around the
    ring, which is at least that of the quickest peers over the shortest links. So over all chains
    and layers, rates times layers are at most what peers can give: the layers that each holds times
    its ceiling with that number, and its KV room.
    """
    model, load = problem.model, service.workload
    given = room = 0.0
    span_max, layer_s = 1, math.inf
    for node in problem.nodes:
        machine, most = service.machines[node.peer_id], 0.0
        spans = range(1, min(len(node.tokens_per_s), model.layers) + 1)
        decode_s = _decode(machine, load).at(1.0)
        for held in spans:
            span = Assignment(peer_id=node.peer_id, start=0, end=held)
            most = max(most, held * ceiling(span, service))
            layer_s = min(layer_s, machine.stretch_of(held) * decode_s)
            span_max = max(span_max, held)
        given += most
        room += max((held * service.kv_tokens(node.peer_id, held) for held in spans), default=0.0)
    stages = math.ceil(model.layers / span_max)
    hops = 0 if stages == 1 else stages - bool(service.hub_delay_s)
    hop_s = min((link.rtt_s for link in problem.links), default=math.inf) / 2
    ring_s = model.layers * layer_s + hops * min(hop_s, problem.default_rtt_s / 2)
    sessions = (1 - ADMISSION.headroom_share) * room / model.layers / load.kv_tokens
    return min(given / model.layers, sessions / ring_s if ring_s > 0 else math.inf)


def layer_token_s(machine: PeerSpeed, load: Workload) -> float:
    """The least time of a layer for each decoded token: the token's own, or that of its share of
    the prompts, whichever is more."""
    prompt = _prompt(machine, load)
    row_s = min(prompt.at(rows) / rows for rows in LIMIT_ROWS)
    decode_s = _decode(machine, load).at(ESTIMATE.decodes_most) / ESTIMATE.decodes_most
    return max(decode_s, row_s * load.input_tokens / load.output_tokens)


def _decode(machine: PeerSpeed, load: Workload) -> Curve:
    """Time of a layer by decodes, at the mean context of the workload's answers."""
    return machine.decode.at_context(load.input_tokens + load.output_tokens / 2)


def _prompt(machine: PeerSpeed, load: Workload) -> Curve:
    """Time of a layer by rows of a prompt's chunk, at the mean context of one."""
    return machine.prompt.at_context(load.input_tokens / 2)


def estimate(
    problem: Problem,
    assignments: Sequence[Assignment],
    edges: Sequence[FlowEdge],
    service: Service,
    least: float = 0.0,
) -> Estimate:
    """The estimate for a placement whose routes are drawn along ``edges``.

    Parts of the flow that share no peer are estimated separately and added; those that share an
    uplink serve together what that carries. Of a single part that would serve less than ``least``
    tokens/s, nothing more is found out.
    """
    held = {a.peer_id: a for a in assignments}
    parts = separate_parts(flow_shares(edges))
    least = least if len(parts) == 1 else 0.0
    found = [_estimate_part(problem, held, part, service, least) for part in parts]
    if len(parts) > 1 and shared_uplinks(problem).bytes_per_s:
        uses = [
            uplinks_used(problem, part, held, service.workload, each.tokens_per_s)
            for part, each in zip(parts, found, strict=True)
        ]
        found = together(found, uses)
    return added(found)


def uplinks_used(
    problem: Problem,
    part: Shares,
    held: Mapping[str, Assignment],
    load: Workload,
    tokens_per_s: float,
) -> dict[Way, float]:
    """The shares of shared uplinks that a part of a flow takes at a rate, its prompts included."""
    shared, visits = shared_uplinks(problem), mean_visits(part, topological(part, held))
    passes = shared.passes(
        (tail, head, visits.get(tail, 0.0) * share)
        for tail, heads in part.items()
        for head, share in heads.items()
    )
    bytes_per_s = tokens_per_s * row_bytes_per_token(problem, load)
    return {way: each * bytes_per_s / shared.bytes_per_s[way] for way, each in passes.items()}


def row_bytes_per_token(problem: Problem, load: Workload) -> float:
    """Bytes on each link of a route for each decoded token, with its share of the prompt's rows."""
    return problem.model.activation_bytes * (1 + load.input_tokens / load.output_tokens)


def together(found: Sequence[Estimate], uses: Sequence[Mapping[Way, float]]) -> list[Estimate]:
    """The estimates of parts that run at the same time and share no peer, with what each takes of
    shared uplinks by itself."""
    kept = kept_shares([part.tokens_per_s for part in found], uses)
    return [
        part
        if share >= 1
        else replace(part, tokens_per_s=part.tokens_per_s * share, requests=part.requests * share)
        for part, share in zip(found, kept, strict=True)
    ]


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
    """The most that any number of requests in flight is served, up to those that fit.

    Routes go round peers that are full. So in a full swarm requests are spread as the room is, also
    over peers that pass few tokens on; the others keep up with these while fewer are in flight.
    """
    order = topological(part, held)
    room = _rooms(problem, held, order, service)
    requests = min(_fitting(problem, held, room), service.workload.requests_max)
    found = _Network(problem, held, order, part, service, requests).most(least)
    kept = within_room(part, order, room, requests)
    if found is NOTHING or kept is part:
        return found
    best, worse = NOTHING, 0
    while worse < ESTIMATE.worse_max:
        found = _Network(problem, held, order, kept, service, requests).most(best.tokens_per_s)
        best, worse = (found, 0) if found is not NOTHING else (best, worse + 1)
        if kept is part:
            break
        requests *= ESTIMATE.fewer
        kept = within_room(part, order, room, requests)
    return best


def _rooms(
    problem: Problem, held: Mapping[str, Assignment], names: Sequence[str], service: Service
) -> dict[str, float]:
    """Maximum requests in flight by each peer's KV room."""
    layers, share = problem.model.layers, 1 - ADMISSION.headroom_share
    found = {}
    for name in names:
        a = held[name]
        tokens = service.machines[name].kv.of(a.start, a.end, layers) / (a.end - a.start)
        found[name] = share * max(0.0, tokens) / service.workload.kv_tokens
    return found


def _fitting(problem: Problem, held: Mapping[str, Assignment], room: Mapping[str, float]) -> float:
    """Maximum requests in flight by the KV room of every layer."""
    of_layer = [0.0] * problem.model.layers
    for name, requests in room.items():
        for layer in range(held[name].start, held[name].end):
            of_layer[layer] += requests
    fullest = min(of_layer)
    return max(fullest - ESTIMATE.left_over, min(fullest, 1.0))


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
        order: Sequence[str],
        kept: Shares,
        service: Service,
        requests_max: float,
    ) -> None:
        self._problem = problem
        self._workload = service.workload
        self._requests_max = requests_max
        visits = self._visits(held, order, kept, service)
        shares = {SOURCE: 1.0} | {name: visit.share for name, visit in visits.items()}
        pairs: list[tuple[str, str, float]] = []
        for tail, heads in kept.items():
            for head, part in heads.items():
                flow = shares.get(tail, 0.0) * part
                if head == SINK or head not in visits or flow <= 0:
                    continue
                begin = 0 if tail == SOURCE else held[tail].end
                visits[head].run += flow * (held[head].end - begin)
                if tail != SOURCE:
                    pairs.append((tail, head, part))
        for visit in visits.values():
            visit.run *= visit.stretch / max(visit.share, 1e-12)
        self._wires(visits, pairs, service)
        self.visits = tuple(visits.values())
        firsts = kept.get(SOURCE, {})
        self._closing_s = self._closing(visits, firsts, service.hub_delay_s)
        self._cut_prompts(visits, firsts)

    def _visits(
        self,
        held: Mapping[str, Assignment],
        order: Sequence[str],
        kept: Shares,
        service: Service,
    ) -> dict[str, _Visit]:
        """The peers on the flow, in its order."""
        load, nodes = self._workload, {node.peer_id: node for node in self._problem.nodes}
        share = mean_visits(kept, order)
        visits: dict[str, _Visit] = {}
        for name in order:
            if share[name] <= 0:  # routes go round it
                continue
            machine = service.machines[name]
            visits[name] = _Visit(
                layers_max=max(1, len(nodes[name].tokens_per_s)),
                decode=_decode(machine, load),
                prompt=_prompt(machine, load),
                overhead_s=machine.step_overhead_s,
                stretch=machine.stretch_of(held[name].end - held[name].start),
                share=share[name],
                ending=kept.get(name, {}).get(SINK, 0.0),
            )
        return visits

    def _cut_prompts(self, visits: Mapping[str, _Visit], firsts: Mapping[str, float]) -> None:
        """Set the chunks that a prompt comes in, as the first stages choose them."""
        load, stages = self._workload, max(1, round(sum(v.share for v in self.visits)))
        link_s = dict.fromkeys(firsts, 0.0)
        names = tuple(visits)
        for visit in self.visits:
            for wire in visit.inbound:
                if names[wire.tail] in link_s:
                    link_s[names[wire.tail]] += wire.part * wire.row_s
        rows = 0.0
        for name, part in firsts.items():
            visit = visits[name]
            row_s = visit.run * visit.prompt.at(LIMIT_ROWS[-2]) / LIMIT_ROWS[-2]
            sizer = ChunkSizer(fixed_s=visit.alone_s, row_s=row_s)
            rows += part * sizer.choose(
                math.ceil(load.input_tokens), stages, link_row_s=link_s[name], others_decode=True
            )
        self._chunk_rows = rows = max(1.0, min(rows, load.input_tokens))
        self._chunks = load.input_tokens / rows
        for visit in self.visits:
            curve = visit.prompt
            visit.chunk_s = visit.run * curve.at(rows)
            most = _prefill_rows_max(curve, visit.layers_max)
            visit.chunks_max = max(1.0, most / rows)

    def _wires(
        self,
        visits: Mapping[str, _Visit],
        pairs: Sequence[tuple[str, str, float]],
        service: Service,
    ) -> None:
        """Set the links, from their ends and the shares of the senders' tokens."""
        problem = self._problem
        bandwidth, rtts = bandwidth_bytes_per_s(problem), round_trips_s(problem)
        own, shared = own_rates_bytes_per_s(problem), shared_uplinks(problem)
        number = {name: index for index, name in enumerate(visits)}
        flows = [visits[tail].share * part for tail, _, part in pairs]
        sent: dict[str, float] = {}
        taken: dict[str, float] = {}
        for (tail, head, _), flow in zip(pairs, flows, strict=True) if own else ():
            sent[tail] = sent.get(tail, 0.0) + flow
            taken[head] = taken.get(head, 0.0) + flow
        passed = shared.passes(
            (tail, head, flow) for (tail, head, _), flow in zip(pairs, flows, strict=True)
        )
        for (tail, head, part), flow in zip(pairs, flows, strict=True):
            stations = [(flow, bandwidth(tail, head))]
            if tail in own:
                stations.append((sent[tail], own[tail][0]))
            if head in own:
                stations.append((taken[head], own[head][1]))
            stations += [
                (passed[way], shared.bytes_per_s[way]) for way in shared.crossed(tail, head)
            ]
            visits[head].inbound.append(
                self._wire(
                    tail=number[tail],
                    part=part,
                    flow=flow,
                    stations=stations,
                    delay_s=rtts.get((tail, head), problem.default_rtt_s) / 2,
                    overhead_s_per_byte=service.machines[head].overhead_s_per_byte,
                )
            )

    def _wire(
        self,
        *,
        tail: int,
        part: float,
        flow: float,
        stations: Sequence[tuple[float, float]],
        delay_s: float,
        overhead_s_per_byte: float,
    ) -> _Wire:
        """A link, from its ends, and the flow and the bytes/s of what it passes."""
        load, activation_bytes = self._workload, self._problem.model.activation_bytes
        narrowest = min(rate for _, rate in stations)
        through, fullest = max(
            stations, key=lambda each: each[0] / each[1] if each[1] else math.inf
        )
        each_s = activation_bytes / fullest if fullest > 0 else 0.0
        # Bytes pass all stations at once: the narrowest sets how long that takes.
        alone_s = activation_bytes / narrowest if narrowest > 0 else 0.0
        long_s = each_s * load.input_tokens
        return _Wire(
            tail=tail,
            part=part,
            flow=flow,
            decodes_busy=through * each_s if narrowest > 0 else math.inf,
            prompts_busy=through * long_s / load.output_tokens,
            each_s=each_s,
            slow_s=long_s * (1 + (load.input_deviation / load.input_tokens) ** 2),
            row_s=alone_s + activation_bytes * overhead_s_per_byte,
            delay_s=delay_s,
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

    def most(self, least: float) -> Estimate:
        """The estimate at the largest rate that fits; ``NOTHING`` below ``least``.

        By false position between the logarithms of the rate and of what is fullest, which of the
        end that stays is halved (the Illinois method; Dowell and Jarratt, 1971).
        """
        low, high = 0.0, self.ceiling()
        if high <= least:
            return NOTHING
        under, over = -math.inf, ESTIMATE.over_max  # of what is fullest at ``low`` and at ``high``
        best: _State | None = None
        was_below: bool | None = None
        rate = least or high / 2
        for _ in range(2 * ESTIMATE.rounds):
            tried = self.at(rate)
            is_below = tried.load < 1
            kept = 0.5 if is_below == was_below else 1.0  # of the end that stays
            if is_below:
                low, best, over = rate, tried, over * kept
                under = math.log(tried.load) if tried.load > 0 else -math.inf
            elif rate == least:
                return NOTHING
            else:
                high, under = rate, under * kept
                over = min(math.log(tried.load), ESTIMATE.over_max)
            was_below = is_below
            if high - low < ESTIMATE.precision * high:
                break
            if under > -math.inf:
                share = over / (over - under)
                rate = low**share * high ** (1 - share)
                near = 0.9 * ESTIMATE.precision * high
                rate = min(max(rate, low + near), high - near)
            else:
                rate = (low + high) / 2
        best = best or self.at(self.ceiling() * 1e-6)
        return Estimate(
            tokens_per_s=low,
            token_time_s=best.token_s,
            prompt_time_s=best.prompt_s,
            requests=low * (best.token_s + best.prompt_s / self._workload.output_tokens),
        )

    def ceiling(self) -> float:
        """A rate above which some peer or link could not keep up."""
        load = self._workload
        least = 1e-12
        for visit in self.visits:
            decodes = visit.run * max(
                visit.decode.at(ESTIMATE.decodes_most) / ESTIMATE.decodes_most, 1e-9
            )
            prompts = self._chunks * visit.chunk_s / load.output_tokens
            least = max(least, visit.share * max(decodes, prompts))
            for wire in visit.inbound:
                least = max(least, wire.decodes_busy + wire.prompts_busy)
        return 1 / least if self._requests_max > 0 else 0.0

    def at(self, rate: float) -> _State:
        """Times at ``rate`` decoded tokens/s, and what is fullest then."""
        load = self._workload
        prompts = rate / load.output_tokens
        fullest = ends_token_s = ends_prompt_s = slowest_s = 0.0
        batches: list[float] = []
        up: list[tuple[float, float]] = []  # mean seconds from the source to each peer's end
        for visit in self.visits:
            share = visit.share
            token = prompt = carried = 0.0
            for wire in visit.inbound:
                decodes_busy, prompts_busy = rate * wire.decodes_busy, rate * wire.prompts_busy
                busy = decodes_busy + prompts_busy
                if busy >= 1:
                    return _State(load=busy)
                fullest = busy if busy > fullest else fullest
                frame = 1 + (batches[wire.tail] - 1) * wire.part
                hop, pace_s = self._hop(wire, frame, decodes_busy, prompts_busy)
                slowest_s = pace_s if pace_s > slowest_s else slowest_s
                before, flow = up[wire.tail], wire.flow
                token += flow * (before[0] + hop[0])
                prompt += flow * (before[1] + hop[1])
                carried += flow * frame
            # Tokens from the clients, and around the ring, come one by one.
            arriving = carried / share if carried > share else 1.0
            step, pace_s, batch, busy = _step(
                visit, rate * share, prompts * share * self._chunks, arriving
            )
            if busy >= 1:
                return _State(load=busy)
            fullest = busy if busy > fullest else fullest
            slowest_s = pace_s if pace_s > slowest_s else slowest_s
            batches.append(batch)
            token, prompt = token / share + step[0], prompt / share + step[1]
            up.append((token, prompt))
            ends_token_s += share * visit.ending * token
            ends_prompt_s += share * visit.ending * prompt
        token_s = ends_token_s + self._closing_s
        # The first chunk passes all stages; the others follow at the slowest one's pace.
        prompt_s = ends_prompt_s + (self._chunks - 1) * slowest_s
        requests = rate * (token_s + prompt_s / load.output_tokens)
        fullest = max(fullest, requests / self._requests_max)
        return _State(load=fullest, token_s=token_s, prompt_s=prompt_s)

    def _hop(
        self, link: _Wire, frame: float, decodes_busy: float, prompts_busy: float
    ) -> tuple[tuple[float, float], float]:
        """Seconds of (a token, a prompt's first chunk) on a link, and those between chunks.

        The decodes of a step share a ``frame``. They overtake prompts, but for the slice under way.
        """
        own_s, free = frame * link.each_s, 1 - decodes_busy
        token = frame * link.row_s + link.delay_s
        token += decodes_busy * own_s / (2 * free) + prompts_busy * SLICE_S / 2
        pace_s = self._chunk_rows * link.each_s / free
        waits_s = prompts_busy * link.slow_s / (2 * (free - prompts_busy))
        prompt = self._chunk_rows * link.row_s / free + link.delay_s + waits_s
        return (token, prompt), pace_s


@lru_cache(maxsize=ESTIMATE.curves_max)
def _prefill_rows_max(prompt: Curve, layers: int) -> int:
    """Rows of prompts in a step of a peer that can hold ``layers`` layers."""
    times = {rows: prompt.at(rows) for rows in LIMIT_ROWS}
    return limits_of(times, layers).prefill_tokens_max


def _step(
    visit: _Visit, decodes: float, chunks: float, arriving: float
) -> tuple[tuple[float, float], float, float, float]:
    """Seconds of (a token, a chunk) at a peer, and those between chunks; decodes of a step; the
    chunks of a step as a share of their maximum, 1 or more where the peer cannot keep up.

    ``decodes`` and ``chunks`` come each second, decodes in frames of ``arriving``. A peer runs all
    decodes that wait as one batch, beside the chunks; it idles only while nothing waits.
    """
    # The search spends most of its time here, hence comparisons instead of min() and max().
    run, decode_s, overhead_s = visit.run, visit.decode.at, visit.overhead_s
    chunk_s, chunks_max = visit.chunk_s, visit.chunks_max
    arrivals = decodes / arriving + chunks
    plain, beside, cycle = visit.alone_s, 0.0, 1.0
    for _ in range(ESTIMATE.rounds):
        before = plain + beside * chunk_s
        during = arrivals * before
        cycle = before + math.exp(-during if during < 50.0 else -50.0) / arrivals
        beside = chunks * cycle
        if beside >= chunks_max or plain > ESTIMATE.step_s_max:
            return (0.0, 0.0), 0.0, 0.0, max(beside / chunks_max, plain / ESTIMATE.step_s_max)
        batch = decodes * cycle
        plain = run * decode_s(batch if batch > arriving else arriving) + overhead_s
        if abs(plain + beside * chunk_s - before) < ESTIMATE.precision * before:
            break
    mean = plain + beside * chunk_s
    laden = plain + chunk_s * (beside if beside > 1.0 else 1.0)
    often = beside if beside < 1.0 else 1.0
    residual = ((1 - often) * plain * plain + often * laden * laden) / (2 * cycle)
    busy = beside / chunks_max
    batch = decodes * cycle
    pace_s = (plain + chunk_s) * (1 + busy / (2 * (1 - busy)))
    return (residual + mean, residual + laden), pace_s, max(batch, 1.0), busy
