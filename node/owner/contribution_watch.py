"""Watches a serving peer: shows its figures every 2 s and saves its contribution."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dht.messages.types import NodeState
from node.owner.contribution import Contribution, load, save
from node.owner.live_panel import PANEL, Figures, OwnerPanel, contribution_text, sentence
from node.owner.reporter import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionConfig:
    """How often what a peer gives is looked at and saved, in seconds."""

    look_s: float = 2.0
    save_s: float = 60.0


CONTRIBUTION = ContributionConfig()


class ContributionWatch:
    """Shows :class:`Figures` until cancelled; the contribution is saved in ``path``."""

    def __init__(
        self,
        look: Callable[[], Figures],
        with_others: Callable[[Figures], Figures],
        helped: Callable[[], int],
        reporter: Reporter,
        path: Path,
        sensors: Callable[[], tuple[float | None, float | None]],
    ) -> None:
        """``look`` returns the peer's figures without those that the watch adds and those that
        ``with_others`` adds for a panel; ``helped`` returns the number of answers that it helped
        with since the start; ``sensors`` returns what :func:`node.device.nvidia.sensors` did."""
        self._look = look
        self._with_others = with_others
        self._helped = helped
        self._reporter = reporter
        self._path = path
        self._before = load(path)
        self._sensors = sensors
        self._serving_s = 0.0
        self._told = 0, 0.0
        """Tokens, and the time up in seconds, as the last line told them."""

    async def run(self) -> None:
        """Look and show at intervals; save the last state when cancelled."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        last, last_s = self._look(), started_s
        rates: deque[float] = deque(maxlen=PANEL.rates_shown_max)
        saved_s = started_s
        try:
            while True:
                await asyncio.sleep(CONTRIBUTION.look_s)
                now_s = loop.time()
                figures, (temperature_c, power_w) = self._look(), self._sensors()
                passed_s = max(1e-3, now_s - last_s)
                self._serving_s += passed_s if figures.state is NodeState.SERVING else 0.0
                rates.append((figures.tokens - last.tokens) / passed_s)
                shown = replace(
                    figures,
                    tokens_per_s=rates[-1],
                    rates=tuple(rates),
                    up_bytes_per_s=(figures.up_bytes - last.up_bytes) / passed_s,
                    down_bytes_per_s=(figures.down_bytes - last.down_bytes) / passed_s,
                    uptime_s=now_s - started_s,
                    lifetime=self._before.plus(figures.tokens, self._helped(), self._serving_s),
                    temperature_c=temperature_c,
                    power_w=power_w,
                )
                self._reporter.show(partial(self._panel, shown), partial(self._line, shown))
                last, last_s = figures, now_s
                if now_s - saved_s >= CONTRIBUTION.save_s:
                    saved_s = now_s
                    await asyncio.to_thread(save, self._path, shown.lifetime)
        finally:
            self._reporter.hide()
            figures = self._look()
            lent = figures.tokens, self._helped(), self._serving_s
            mine = contribution_text(Contribution().plus(*lent))
            self._reporter.say(f"Lent this time: {mine}. Thank you.")
            save(self._path, self._before.plus(*lent))

    def _line(self, figures: Figures) -> str:
        """The figures as a line, at the mean rate since the line before: a log has few of them, and
        one look says nothing of the minutes between."""
        tokens, told_s = self._told
        self._told = figures.tokens, figures.uptime_s
        passed_s = max(1e-3, figures.uptime_s - told_s)
        return sentence(replace(figures, tokens_per_s=(figures.tokens - tokens) / passed_s))

    def _panel(self, figures: Figures) -> OwnerPanel:
        return OwnerPanel(self._with_others(figures))
