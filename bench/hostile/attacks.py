"""All attacks by name, and what each needs to show what it does."""

from dataclasses import dataclass

from bench.hostile import members, pages, strangers
from bench.hostile.attacker import Attack


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attack of the table."""

    attack: Attack
    seconds: float = 20.0
    gateway: bool = False
    """Whether it goes against a gateway, through which honest callers then ask, too."""
    command: bool = False
    """Whether somebody also asks by the command meanwhile, whose output goes to a terminal."""

    @property
    def what(self) -> str:
        """The attack in a sentence."""
        return (self.attack.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")


PLANNED_S, JOINED_S = 45.0, 60.0
"""Long enough for the coordinator to plan with a newcomer, and for one to load what it planned."""

ATTACKS: dict[str, Row] = {
    "plan_with_more_layers": Row(attack=members.plan_with_more_layers),
    "repeated_finds": Row(attack=strangers.repeated_finds),
    "unread_pongs": Row(attack=strangers.unread_pongs),
    "unfinished_frames": Row(attack=strangers.unfinished_frames),
    "idle_streams": Row(attack=strangers.idle_streams),
    "opens_in_anothers_name": Row(attack=strangers.opens_in_anothers_name),
    "plan_for_itself": Row(attack=members.plan_for_itself),
    "plan_without_last_holders": Row(attack=members.plan_without_last_holders, seconds=PLANNED_S),
    "says_it_is_far_faster": Row(attack=members.says_it_is_far_faster, seconds=PLANNED_S),
    "made_up_models": Row(attack=members.made_up_models),
    "dials_on_order": Row(attack=strangers.dials_on_order),
    "deaf_to_the_leader": Row(attack=members.deaf_to_the_leader, seconds=PLANNED_S),
    "calls_requests_unsound": Row(attack=members.calls_requests_unsound, seconds=PLANNED_S),
    "says_another_leaves": Row(attack=members.says_another_leaves, seconds=PLANNED_S),
    "rows_of_nan": Row(attack=members.rows_of_nan, seconds=PLANNED_S),
    "claims_urgency": Row(attack=strangers.claims_urgency),
    "links_near_zero": Row(attack=members.links_near_zero),
    "prompts_token_by_token": Row(attack=strangers.prompts_token_by_token),
    "costly_sampling": Row(attack=strangers.costly_sampling),
    "huge_prompts": Row(attack=pages.huge_prompts, gateway=True),
    "long_stop_strings": Row(attack=pages.long_stop_strings, gateway=True),
    "unfinished_bodies": Row(attack=pages.unfinished_bodies, gateway=True),
    "escapes_in_reasons": Row(attack=members.escapes_in_reasons, command=True),
    "foreign_pages": Row(attack=pages.foreign_pages, gateway=True),
    "huge_plan_body": Row(attack=members.huge_plan_body),
    "other_weights": Row(attack=members.other_weights, seconds=JOINED_S),
}

NOT_PLAYED = {
    "old libraries in the daemon": "a dependency, which only its update closes",
    "packages and images without hashes": "an attack on what is installed, not on who is reached",
    "a configuration with millions of layers": "a file that the owner chose; no peer sends one",
    "keys in the list of processes": "seen by users of the same machine, not over the network",
    "wrong answers of a stage that is used": "not protected against (docs/threat-model.md)",
}
"""What threatens a swarm and is no message that a stranger could send."""
