"""A seeded generator of small river stories, the text that the bundled model is trained on.

``story(seed, index)`` is the story of that number; the same two numbers always give the same
story. Run as a script, it prints a few::

    python -m models.stories --seed 1 --count 3
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.teller import Teller
from models.words import BAKED, Character


@dataclass(frozen=True)
class Story:
    text: str
    plot: str
    cast: tuple[Character, ...]


def _meet(t: Teller) -> None:
    """Bring the friend in."""
    t.say(
        "just then {b.intro} came along.",
        "soon {b.intro} came by, whistling.",
        "{b.intro} heard it all and came to see what was the matter.",
        "{his} friend {b.intro} looked over the fence.",
        "{he} met {b.intro} {r.at}.",
        "{b.intro} was sitting {r.at}, doing nothing at all.",
    )


def _thanks(t: Teller, who: Character, to: Character) -> None:
    t.fields["to"] = to
    t.quote(
        who,
        "Thank you, {to}!",
        "Thank you, {to}. You are a good friend.",
        "How can I ever thank you, {to}?",
        "I would never have managed without you, {to}.",
        "Thank you, {to}. That was kind.",
    )
    if t.rng.random() < 0.5:
        t.quote(
            to,
            "It was nothing.",
            "That is what friends are for.",
            "You would have done the same for me.",
            "You can thank me with {food}.",
            "Any time. Well, any time except nap time.",
        )


def lost_and_found(t: Teller) -> None:
    """Something dear is gone, and turns up where nobody looked."""
    t.open()
    t.say(
        "{a} had {x.a}, and {he} took it everywhere.",
        "{a} owned {x.a}, and {he} loved it more than {food}.",
        "of all {his} things, {a} liked {his} {x.full} best.",
        "{his} grandmother had given {him} {x.a}, and {a} was very proud of it.",
    )
    t.say(
        "{when}, {x.the} was gone.",
        "{when}, {a} could not find it anywhere.",
        "{when}, {a} woke up, and {x.the} was not in its place.",
        "but {when}, {a} reached for {x.the}, and it was not there.",
    )
    t.maybe("{a} was very sad.", "{a} nearly cried.", "{a} sat down on the floor with a bump.")
    t.some(
        2,
        (
            "{he} looked under the bed, but there was only dust and one lonely sock.",
            "{he} looked behind the stove, but there was only a spider, who waved.",
            "{he} looked {p.at}, but {he} found only a snail on its way to somewhere else.",
            "{he} looked in the soup pot, which was silly, but you never know.",
            "{he} looked in every drawer, and then in every drawer again.",
            "{he} looked in the attic, and then {he} looked there once more with {his} eyes wide open.",
            "{he} asked a fish, but the fish said nothing.",
        ),
    )
    t.aside()
    _meet(t)
    t.quote(t.b, "What are you looking for?", "What is wrong, {a}?", "Why do you look so sad?")
    t.quote(t.a, "I have lost my {x.full}.", "My {x} is gone!", "I cannot find my {x} anywhere.")
    t.quote(
        t.b,
        "Then let us look for it together.",
        "Four eyes are better than two. I will help you.",
        "Where did you see it last?",
        "Do not worry. Lost things are always somewhere.",
    )
    endings = ["kept", "back"] + (["nest", "nest"] if t.x.nest else [])
    ending = t.rng.choice(endings)
    if ending == "kept":
        t.say(
            "so they walked on until they met {c.intro} {q.at}, and {c.he} was holding {x.the}.",
            "they went on, and {q.at} sat {c.intro} with {x.the} beside {c.him}.",
        )
        t.quote(
            t.c,
            "I found it in the grass, and I have been looking for its owner all day.",
            "Is this yours? It came down the river this morning.",
            "I did not know whose {x} it was, so I kept it safe and dry.",
        )
        _thanks(t, t.a, t.c)
        t.close(
            "after that {a} still took {x.the} everywhere, but {he} tied it on with a string.",
            "{a} went home with {x.the} and with two friends, which was more than {he} had lost.",
            "that evening {x.the} was back in its place, and all three of them had {food}.",
        )
    elif ending == "back":
        t.say(
            "they looked {q.at} and they looked everywhere else, and then {b} began to laugh.",
            "{b} walked once around {a}, slowly, and then {b.he} smiled.",
        )
        t.quote(
            t.b,
            "{a}, what is that tied to your back?",
            "{a}, what is that under your arm?",
            "{a}, have you looked behind you?",
        )
        t.say(
            "it was {x.the}. It had been there the whole time.",
            "{a} turned around three times before {he} saw it. It was {x.the}!",
        )
        t.say(
            "{a} turned as red as a beet, and then {he} laughed too.",
            "they laughed so hard that the ducks flew up.",
        )
        t.close(
            "from that day on {a} always looked at {himself} first.",
            "{a} never lost {x.the} again, although {he} did lose {his} left shoe.",
            '"Next time," said {b}, "we will start with you."',
        )
    else:
        t.say(
            "at last they found {x.the} {q.at}, and it was not empty.",
            "and there it was, {q.at}, with something moving inside it.",
        )
        t.say(
            "a wren had built her nest in {x.the}, and there were three tiny eggs in it.",
            "a family of very small mice had moved in.",
            "a duckling was asleep in {x.the}, and it was snoring.",
        )
        t.quote(
            t.a,
            "Well, I cannot take it now.",
            "Shh! They need it more than I do.",
            "Then it shall stay here until they are big.",
        )
        t.close(
            "every day {a} came to visit {his} {x}, and every day it was a little more full.",
            "so {a} lost {x.the} and found a whole family, and {he} thought that was a fair trade.",
        )


def stuck_boat(t: Teller) -> None:
    """A loaded boat is stuck, and the smallest idea frees it."""
    t.fields["boat"] = t.rng.choice(("ferry", "barge", "raft", "rowboat", "sailboat"))
    t.open_on_the_day(
        "{who} was bringing a {boat} full of {cargo} down the river.",
        "{who} set out in a {boat} with a great heap of {cargo}.",
        "{who} loaded {his} {boat} with {cargo} and pushed off from the bank.",
    )
    t.say(
        "all went well until the {boat} hit a sandbank and stopped with a bump.",
        "near {p} there was a soft sound, and the {boat} sat down in the mud.",
        "then the {boat} slid in between two rocks and stayed there.",
    )
    t.quote(t.a, "Oh dear. We are stuck.", "Stuck!", "This {boat} does not want to move.")
    t.say(
        "{a} pushed with a pole, but the pole got stuck too.",
        "{a} pushed until {his} face was red, but the {boat} did not move.",
        "{a} asked the {boat} nicely, and then not so nicely, but it did not move.",
    )
    t.aside()
    t.say(
        "{b.intro} saw it from the bank and threw {him} a rope.",
        "{b.intro} came wading through the water to help.",
        "on the bank stood {b.intro}, who was very strong and liked everyone to know it.",
    )
    t.quote(
        t.b,
        "I will have you out in a minute!",
        "Leave it to me.",
        "Stand back. I have big muscles.",
    )
    t.say(
        "{b} pulled and pulled, and then the rope broke, and {b.he} sat down in the river.",
        "{b} pushed so hard that {b.he} fell on {b.his} nose in the mud.",
        "{b} pulled until {b.he} was out of breath, but the {boat} only creaked.",
    )
    t.say(
        "then a small voice spoke. It was {c.intro}.",
        "{c.intro} had been watching for a while, eating {food}.",
        "now {c.intro}, who was the smallest of them all, held up one {c.hand}.",
    )
    ideas = {
        "cargo": "The {boat} is too heavy. Take out the {cargo} first.",
        "song": "You are both pulling at different times. Let us sing, and pull on the last word.",
        "wait": "Let us ask the miller to open the gate. Then the water will rise.",
    }
    idea = t.rng.choice(sorted(ideas))
    t.quote(t.c, ideas[idea])
    t.maybe(
        "nobody had thought of that.",
        "{a} and {b} looked at each other.",
        '"Hm," said {b}, who wished that {b.he} had said it.',
    )
    if idea == "cargo":
        t.say(
            "so they carried the {cargo} to the bank, one after another, and the {boat} rose up "
            "like a cork.",
            "they made a long line and passed the {cargo} to the bank, and soon the {boat} "
            "floated free.",
        )
    elif idea == "song":
        t.say(
            "they sang, and on the last word they all pulled, and the {boat} jumped free.",
            "it was not a very good song, but on the last word the {boat} slid out as smoothly "
            "as butter.",
        )
    else:
        t.say(
            "the miller opened the gate, the water rose, and the {boat} lifted itself off the "
            "ground.",
            "soon the water came, a little and then a lot, and the {boat} floated away by itself.",
        )
    t.say('"Hooray!" they all shouted.', "the ducks cheered.", "{a} rang the bell for joy.")
    if t.rng.random() < 0.5:
        _thanks(t, t.a, t.c)
    t.close(
        "{a} gave {c} as many {cargo} as {c.he} could carry, which was two.",
        "since that day {c} has sat at the front of the {boat}, and {a} always asks {c.him} first.",
        "{b} gave {c} a ride home on {b.his} shoulders, so that for once {c.he} was the tallest.",
        "and that is why {c} had {cargo} in {c.his} house all winter long.",
    )


def fair_trades(t: Teller) -> None:
    """One thing is traded for another until a friend gets what the friend needs."""
    t.open()
    t.say(
        "{when}, {his} friend {b.intro} was ill in bed.",
        "{when}, {a} heard that {b.intro} had a cold.",
        "{when}, {a} went to see {b.intro}, and found {b.him} in bed with a red nose.",
    )
    t.quote(
        t.b,
        "All I want is some {food}.",
        "I think that only {food} could make me well again.",
        "I feel terrible. If only I had some {food}.",
    )
    t.say(
        "{a} had no {food}, and no money either. All {he} had was {x.a}.",
        "{a} looked in {his} bag and found no {food}, only {x.a}.",
    )
    t.say(
        "so {he} took {x.the} and walked to the market.",
        "{he} put {x.the} under {his} arm and set out.",
    )
    t.aside()
    t.say("{p.at} {he} met {c.intro}.", "{he} had not gone far when {he} met {c.intro} {p.at}.")
    t.quote(
        t.c,
        "My sister would love your {x}.",
        "My own {x} fell into the river.",
        "I am going on a journey, and I have no {x} to take with me.",
        "Your {x} is just what I need for the summer fair.",
    )
    t.quote(
        t.c,
        "Will you trade it for my {y.full}?",
        "I will give you this {y.full} for it.",
        "All I have is {y.a}. Would that be fair?",
    )
    t.say(
        "{a} thought about {b}, and {he} nodded.",
        "{a} looked at {x.the} one last time, and gave it away.",
        "so {a} gave {c} {x.the}, and {c} gave {a} {y.the}.",
    )
    t.say(
        "then {he} walked on with {y.the} until {he} came to {d.intro}.",
        "{q.at} stood {d.intro}, looking at {y.the} with wide eyes.",
    )
    t.quote(
        t.d,
        "I have been looking for a {y} like that for seven years!",
        "What a beautiful {y}!",
        "Oh, how I need a {y}!",
    )
    t.say(
        "{d} had a whole basket full of {food}.",
        "and {d}, as it happened, had just made a great deal of {food}.",
    )
    t.say(
        "{d} took {y.the}, and {a} took the {food} and ran all the way back.",
        "they traded at once, and {a} hurried home before the {food} could get cold.",
    )
    t.say(
        "{b} ate every bit of it, and {b.his} nose turned back to its usual color.",
        "{b} took one bite, and then another, and then {b.he} sat up in bed.",
    )
    _thanks(t, t.b, t.a)
    t.close(
        "{a} had no {x} any more, but {he} did not miss it at all.",
        'the next day {c} came by and gave {x.the} back. "It likes you better," {c.he} said.',
        "and when {a} caught the same cold, it was {b} who brought the {food}.",
    )


@dataclass(frozen=True)
class Fear:
    """A fear: its object, how it shows, and what is behind it."""

    what: str
    shown: str
    comfort: str
    truth: str


FEARS: tuple[Fear, ...] = (
    Fear(
        "the dark",
        "when the sun went down, {a} lit nine candles and kept one eye open.",
        "The dark is only the day with its eyes closed.",
        "they sat in the dark together, and soon they saw stars, and then more stars, and a "
        "firefly with somewhere to go.",
    ),
    Fear(
        "thunder",
        "when the sky went boom, {a} hid in the laundry basket.",
        "Thunder is only the clouds moving their furniture.",
        "they sat at the window and guessed what the clouds were moving. A table. A piano. "
        "Another piano.",
    ),
    Fear(
        "deep water",
        "when the others swam, {a} stayed on the bank and looked after the towels.",
        "Put one {a.hand} in. That is all for today.",
        "the next day it was two, and the day after that {a} was in up to the chin and laughing.",
    ),
    Fear(
        "the attic",
        "there was something up there that creaked, and {a} never went farther than the third step.",
        "Let us go up one step at a time, and count them.",
        "there were thirteen steps, and at the top stood an old rocking chair that rocked all by "
        "itself, because the window was open.",
    ),
    Fear(
        "talking to strangers",
        "when somebody new came by, {a} pretended to be a bush.",
        "A stranger is only a friend whose name you do not know. Try it on me.",
        "{a} practiced on {b}, and then on a scarecrow, and then on {c.intro}, who said that it was "
        "a pleasure.",
    ),
    Fear(
        "the long bridge",
        "every day {a} took the long way around, which was two miles and very muddy.",
        "Do not look down. Look at me, and tell me about breakfast.",
        "{a} talked about breakfast, and before {he} got to the {food} they were on the other "
        "side.",
    ),
    Fear(
        "the noise in the night",
        "every night there was a noise, hoo, hoo, and {a} pulled the blanket over {his} head.",
        "Let us go and see who it is. I will bring a lantern.",
        "they followed the noise, and there was {c.intro}, blowing across the top of a bottle. "
        "{c} only wanted someone to play with.",
    ),
    Fear(
        "the monster in the river",
        "{a} had seen it one evening, big and dark, with one long arm.",
        "I have never met a monster before. Please show me.",
        "they went to look, and the monster was an old log with a branch. A turtle was sitting "
        "on it, drying its socks.",
    ),
)


def afraid(t: Teller) -> None:
    """A fear gets smaller with a friend beside it, and is of use to somebody else."""
    fear = t.rng.choice(FEARS)
    t.fields["fear"] = fear.what
    t.fields["friend_fear"] = t.rng.choice(("buttons", "geese", "feathers", "soup", "sneezing"))
    t.open()
    t.say(
        "{a} was afraid of only one thing, and that was {fear}.",
        "nobody knew it, but {a} was afraid of {fear}.",
        "{a} was not afraid of storms of soup or of angry geese. {He} was afraid of {fear}.",
    )
    t.say(fear.shown)
    t.say(
        "{when}, {b.intro} found out.",
        "{when}, {he} told {b.intro} about it, very quietly.",
        "{when}, {b.intro} came to visit, and {b.he} saw it at once.",
    )
    t.maybe("{a} looked at the ground.", "{a} felt very silly.", "{a} waited for {b} to laugh.")
    t.quote(
        t.b,
        "I am not going to laugh. I am afraid of {friend_fear}.",
        "Everyone is afraid of something. I am afraid of {friend_fear}.",
        "That is all right. I am afraid of {friend_fear}.",
        "Can I tell you a secret? I am afraid of {friend_fear}.",
    )
    t.say(
        '"You are?" asked {a}, and {he} felt a little better.',
        "{a} was very surprised to hear it.",
        '"Really?" asked {a}. "Really," said {b}.',
    )
    t.quote(t.b, fear.comfort)
    t.maybe(
        "{a} took a deep breath and held {b.his} {b.hand}.",
        '{a} thought about it for a long time. "All right," {he} said.',
        '"Are you sure?" asked {a}. "Nearly sure," said {b}.',
    )
    t.say(fear.truth)
    t.say(
        "{a} was so surprised that {he} forgot to be afraid.",
        '"Is that all?" said {a}, and {he} began to laugh.',
        "the fear did not go away, but it got so small that {a} could put it in a pocket.",
    )
    if t.rng.random() < 0.6 and fear.what in ("the dark", "thunder", "deep water"):
        t.say(
            "not long after that, {a} met {d.intro}, who was shaking all over.",
            "a week later {he} found {d.intro} hiding behind a barrel.",
        )
        t.quote(t.d, "I am afraid of {fear}.", "Please do not laugh. It is {fear}.")
        t.say(
            "{a} sat down beside {d.him} and told {d.him} just what {b} had said.",
            '{a} did not laugh. {He} held out one {a.hand}. "So was I," {he} said.',
        )
    t.close(
        "and {b} is still afraid of {friend_fear}, but {a} is helping {b.him} with that.",
        "since then, whenever {a} feels afraid, {he} thinks of {b}, and then {he} feels brave.",
        "that night {a} slept well, with both eyes closed.",
        "being brave is easier with two, and now {a} knew it.",
    )


def quarrel(t: Teller) -> None:
    """Two want the same thing, nearly lose it, and learn to share it."""
    t.open_on_the_day(
        "{who} and {b.intro} went for a walk together.",
        "{who} and {b.intro} were fishing {r.at}.",
        "{who} and {b.intro} were on their way home from {r}.",
    )
    t.maybe(
        "they talked about the weather, and about {food}.",
        "they had been friends for years and had never quarreled, or only a little.",
        "{a} told a story, and {b} laughed in the wrong place.",
    )
    t.say(
        "{p.at} they found {x.a}.",
        "they both saw it at the same time. It was {x.a}, lying {p.at}.",
        "there, {p.at}, lay {x.a}, all alone.",
    )
    t.quote(t.a, "It is mine! I saw it first.", "Mine!", "Look what I have found!")
    t.quote(
        t.b,
        "No, it is mine. I saw it before you did.",
        "You mean, look what I have found!",
        "But I picked it up!",
    )
    t.say(
        "{a} pulled on one side, and {b} pulled on the other.",
        "they pulled, and they shouted, and they said things about each other's ears.",
        "{a} would not let go, and {b} would not let go either.",
    )
    t.say(
        "then {x.the} flew out of their hands and landed in the river with a splash.",
        "suddenly {x.the} slipped away and rolled right into the river.",
    )
    t.say(
        "the river did not care whose it was, and carried it off.",
        "it floated away, turning around and around.",
        '"Oh no," they both said, and it was the first thing they had agreed on.',
    )
    t.say(
        "{a} could run fast, and {b} could swim well, so they worked together.",
        "{a} ran along the bank, and {b} jumped into the water.",
        "they jumped into an old tub. {a} rowed with a spoon, and {b} steered with a hat.",
    )
    t.maybe(
        '{c.intro} pointed the way. "It went past {q}!"',
        "{c.intro} watched them go by and shook {c.his} head.",
        '"Left!" cried {a}. "More left!"',
    )
    t.say(
        "{q.at} {b} caught {x.the}, and {a} pulled them both out.",
        "just before the waterfall, {b} got hold of {x.the}, and {a} got hold of {b}.",
        "at last it stopped {q.at}, and they got there at the same time, wet and out of breath.",
    )
    t.quote(
        t.b, "You can have it.", "You take it, {a}. I am sorry.", "Without you it would be gone."
    )
    t.quote(t.a, "No, you can have it.", "We could share it.", "Let it be ours.")
    t.say(
        "so {x.the} stayed with {a} on one day and with {b} on the next, and on Sundays it had "
        "a rest.",
        "they put {x.the} on the shelf in {a.name}'s house, and {b} had a key to the door.",
        "they agreed to share {x.the}, and they shook on it.",
    )
    t.close(
        "they never quarreled about {x.the} again. They quarreled about {food}, but that is "
        "another story.",
        "and if you ask them who saw it first, each of them will point at the other.",
        "{x.the} was nice, but it was much nicer with two.",
    )


def the_race(t: Teller) -> None:
    """The one who stops to help does not win the race, but wins something else."""
    t.fields["race"] = t.rng.choice(
        ("raft race", "rowing race", "swimming race", "bathtub race", "race around the island")
    )
    t.open()
    t.say(
        "{a} wanted to win the great {race}, and {he} practiced every day.",
        "every year there was a {race}, and every year {a} came in last.",
        "there was going to be a {race}, and the prize was {x.a}.",
    )
    t.maybe(
        "{b.intro} was the fastest on the river, and {b.he} said so often.",
        '{b.intro} had won it three times. "I shall win again," said {b}.',
        chance=0.99,
    )
    t.say(
        "{when}, everyone came to the river to watch.",
        "{when}, they all lined up {p.at}.",
        "{when}, the race began.",
    )
    t.say(
        '"Ready, steady, go!" called {d.intro}.',
        '"One, two, three, go!" cried {d.intro}.',
        "{d.intro} rang the bell, and off they went.",
    )
    t.say(
        "{a} was fast that day. {He} passed {p}, and then {he} passed {b}.",
        "{a} flew over the water, and soon {he} was in front of everyone, even {b}.",
    )
    t.say(
        "then {he} heard somebody cry. It was {c.intro}, who was caught in the reeds.",
        "but then {he} saw {c.intro}, who had fallen in and was holding on to a branch.",
        "{q.at} sat {c.intro} with a hurt foot and a basket full of spilled {cargo}.",
    )
    t.quote(t.c, "Help me, please!", "Go on, do not stop for me!", "Can you help me?")
    t.say(
        "{a} looked at the finish, and {he} looked at {c}. Then {he} stopped.",
        "it did not take {a} long to choose. {He} turned around.",
        '"Bother the race," said {a}, and {he} stopped.',
    )
    t.say(
        "{he} helped {c} out, and dried {c.him} with {his} own scarf.",
        "{he} lifted {c} up and took {c.him} along.",
        "{he} held out one {a.hand} and pulled {c} to safety.",
    )
    t.say(
        "by then {b} had won, and {a} came in last, with {c} beside {him}.",
        "one after another the others went by, and {a} and {c} came in last of all.",
    )
    t.say(
        "but the crowd clapped louder for {a} than for {b}.",
        "everybody clapped until their hands hurt.",
        "it was quiet for a moment, and then everyone cheered.",
    )
    t.quote(
        t.b,
        "I was faster, but you were better.",
        "I saw it too, and I did not stop. I wish that I had.",
        "Here, {a}. The {x} should be yours.",
    )
    t.close(
        "{c} baked {him} {food}, and that tasted better than any prize.",
        "the next year {a} and {c} raced together, and they came in last again, laughing.",
        "{a} never won a prize, but {he} never rowed alone again either.",
        "on {a.name}'s shelf, where the prize would have been, stands a thank-you card from {c}.",
    )


def mystery(t: Teller) -> None:
    """Food goes missing in the night, and the thief is nothing like a thief."""
    t.fields["food"] = t.rng.choice(BAKED)
    t.open()
    t.say(
        "{a} made the best {food} on the river, and put it on the windowsill to cool.",
        "every evening {a} put some {food} on the windowsill for the next day.",
    )
    t.say(
        "{when}, it was gone. Only a few crumbs were left.",
        "but {when}, there was nothing left of it but the plate.",
    )
    t.say(
        "the next day it happened again, and the day after that.",
        "{a} made more, and the next day that was gone as well.",
    )
    t.quote(t.a, "There is a thief about!", "Who is eating my {food}?", "This is a mystery!")
    t.say(
        "{he} asked {b.intro} for help, because {b} had a magnifying glass.",
        "{b.intro} put on a large coat and said that {b.he} was now a detective.",
        "{he} told {b.intro}, who loved a mystery.",
    )
    t.say(
        '{b} looked at the crumbs. "Aha," said {b}, but {b.he} did not say why.',
        "{b} found a footprint, and followed it around the house, and it was {b.his} own.",
        "{b} asked everyone some hard questions. Even the goat had to say where it had been.",
    )
    t.quote(
        t.b,
        "We must stay awake tonight and watch.",
        "Tonight we will hide behind the curtain.",
        "A good detective waits.",
    )
    t.say(
        "so they sat in the dark and waited. {b} fell asleep twice.",
        "they hid under the table, and it was hard not to giggle.",
        "they waited and waited. The clock struck ten, and eleven, and twelve.",
    )
    t.say(
        "at midnight the window opened slowly.",
        "then they heard a step, and another step, and somebody sighed.",
        "at last a shadow came over the windowsill.",
    )
    kind = t.rng.choice(("asleep", "shy", "self"))
    if kind == "asleep":
        t.say(
            "it was {c.intro}, in {c.his} nightshirt, with {c.his} eyes closed.",
            "in came {c.intro}, and {c.he} was fast asleep.",
        )
        t.say(
            "{c} ate it all, bowed to the lamp, and went home without waking up.",
            "{c} was walking in {c.his} sleep, and eating in it too.",
        )
        t.say(
            "the next morning they told {c}, who did not believe it until they showed {c.him} the "
            "crumbs on {c.his} pillow.",
        )
        t.quote(
            t.c,
            "And I thought that I only dreamed of {food}!",
            "So that is why I am never hungry at breakfast!",
        )
        t.close(
            "after that {a} left two plates on the windowsill, and one of them was for {c}.",
            "now {c} comes to eat with {a} when {c.he} is awake, and enjoys it twice as much.",
        )
    elif kind == "shy":
        t.say(
            "it was {c.intro}, who was new in the village and knew nobody.",
            "it was only little {c.intro}, thin and cold.",
        )
        t.quote(
            t.c,
            "I am sorry. I was too shy to ask.",
            "It smelled so good, and I did not dare to knock.",
            "I meant to leave you {y.a} for it. Here it is.",
        )
        t.say(
            "{a} was not angry any more. {He} put another plate on the table.",
            '"You only have to knock," said {a}, and {he} opened the door wide.',
        )
        t.close(
            "from then on {c} knocked every evening, and there was always {food} for three.",
            'the mystery was solved, and {b} wrote it down. "Case one," {b.he} wrote. "New '
            'friend found."',
        )
    else:
        t.say(
            "the shadow had {a.name}'s nose and {a.name}'s feet. It was a mirror that {b} had "
            "left there.",
        )
        t.say(
            "and behind the mirror sat {c.intro} with a full mouth.",
            "behind it, chewing, sat {c.intro}.",
        )
        t.quote(t.c, "Good evening. Is there any more?", "It needs a little more salt.")
        t.say(
            "{b} tried to look strict, and then they all began to laugh.",
            "{a} wanted to be angry, but {he} had to laugh.",
        )
        t.close(
            "now {c} does the dishes every evening, and gets the first piece for it.",
            "{a} gave {c} the recipe, and since then there has been {food} on two windowsills.",
        )


MACHINES: tuple[tuple[str, str, str], ...] = (
    ("make tea", "it sprayed tea over the whole kitchen", "it watered the whole garden"),
    ("peel apples", "it threw apples through the window", "it picked every apple in the orchard"),
    (
        "sweep the floor",
        "it swept the rug, the cat and the chairs out of the door",
        "it swept all the snow off the village street",
    ),
    ("ring the bell for lunch", "it rang all night long", "it kept the crows out of the corn"),
    (
        "find lost socks",
        "it found every sock in the village and would not give them back",
        "it found the mayor's glasses, the baker's ring and a cat named Button",
    ),
    (
        "butter the bread",
        "it buttered the bread, the door handle and {b}",
        "it greased the old mill wheel, which turned for the first time in years",
    ),
    (
        "dry the laundry",
        "it blew the socks over the river",
        "it blew all the sailboats home on a day without wind",
    ),
    (
        "pour the soup",
        "it poured soup on the table, the wall and a passing duck",
        "it filled all the bowls at the summer fair in one minute",
    ),
)


def invention(t: Teller) -> None:
    """A machine goes wrong and turns out to be good for something else."""
    purpose, trouble, use = t.rng.choice(MACHINES)
    t.fields.update(purpose=purpose, trouble=t.fill(trouble), use=use)
    t.open()
    t.say(
        "{a} loved to build things. {When}, {he} had an idea.",
        "{when}, {a} decided to build a machine.",
        "{when}, {a} could not sleep, because {he} had an idea for a machine.",
    )
    t.quote(
        t.a,
        "I will build a machine to {purpose}!",
        "Why should I {purpose} myself? I will build a machine.",
    )
    t.say(
        "{he} used {x.a}, {y.a}, a lot of string and a bicycle wheel.",
        "{he} took {x.a}, a bathtub, two springs and {y.a}, and put them all together.",
        "it had seven wheels, one chimney and {x.a} on top.",
    )
    t.maybe("it took all day and half of the night.", "it looked a bit like a goose.")
    t.say(
        '{b.intro} came to see it. "Does it work?" {b.he} asked.',
        '"What is that?" asked {b.intro}, and {b.he} took one step back.',
        "all the neighbors came to look, and {b.intro} stood right in front.",
    )
    t.say(
        '"Of course," said {a}, and {he} pulled the handle.',
        '"Watch this," said {a} proudly, and {he} pressed the big red button.',
    )
    t.say(
        "the machine went clank and whirr and bang, and then {trouble}.",
        "it hummed, it shook, and then {trouble}.",
    )
    t.quote(t.b, "Make it stop!", "I think it works too well.", "Is it supposed to do that?")
    t.say(
        "{a} pulled the handle again, but it came off in {his} {a.hand}.",
        "{a} ran around it three times and could not find the way to stop it.",
    )
    t.say(
        "{b} took hold of the string and pulled, and the machine went quiet.",
        "{b} sat down on it, and that helped.",
    )
    t.say(
        '{a} was very sad. "It is no good," {he} said.',
        '"I am a bad inventor," said {a}, and {his} voice was very small.',
        "{a} wanted to throw it into the river.",
    )
    t.say(
        "but {b} walked around the machine and thought.",
        "{b} was quiet for a while, and then {b.he} smiled.",
    )
    t.quote(
        t.b,
        "It is not a bad machine. It only wants another job.",
        "Maybe it does not like that job. Let us find it a better one.",
    )
    t.say(
        "so they turned it around and took it outside, and {use}.",
        "they carried it out together and tried again, and this time {use}.",
    )
    t.close(
        "{a} still has to {purpose} by {himself}, but {he} does not mind.",
        "the whole village was proud of {a}, and {a} was proud of {b}.",
        '"Just as I planned," said {a}, and {b} was too kind to say anything.',
        "and {a} is already building the next one, so stay away from {his} kitchen.",
    )


def birthday(t: Teller) -> None:
    """Everyone seems to have forgotten, and nobody has."""
    t.open()
    t.say(
        "{when}, {a} woke up with a smile. It was {his} birthday.",
        "{when}, it was {a.name}'s birthday, and {he} got up before the sun.",
    )
    t.say(
        "{he} put on {his} best scarf and went out to be congratulated.",
        "{he} sat by the door and waited for somebody to knock. Nobody did.",
    )
    t.say("{p.at} {he} met {b.intro}.", "first {he} went to see {b.intro}.")
    t.quote(t.a, "Do you know what day it is?", "Is today not a special day?")
    t.quote(
        t.b,
        "Yes, it is washing day. I must run.",
        "I have no time. I have to count my {cargo}.",
        "No idea! Goodbye!",
    )
    t.say("then {he} met {c.intro}.", "{c.intro} was in a hurry too.")
    t.quote(
        t.c,
        "Please do not look in my bag. There is nothing in it.",
        "I cannot talk now. I have a cake, I mean, a cough.",
        "I have to go and blow up a, well, I have to go.",
    )
    t.say(
        "{a} thought that everyone had forgotten {him}.",
        '"They have all forgotten," {a} said to the river.',
        "{a} walked along the river all alone, and a tear fell on {his} nose.",
    )
    t.aside()
    t.say(
        "when it got dark, {he} saw a light {q.at}.",
        "in the evening {he} went home the long way, past {q}. There was a light.",
    )
    t.say(
        'somebody giggled. Somebody else said "Shh!"',
        "it was very quiet there, a bit too quiet.",
    )
    t.say(
        'and then a hundred lanterns lit up at once. "Surprise!" they all shouted.',
        '"Surprise!" cried {b} and {c}, and they jumped out so fast that {c} fell over.',
    )
    t.say(
        "there was {food}, and there was {food2}, and there was a band with one drum.",
        "the table was so full of {food} that it bent in the middle.",
    )
    t.say(
        "{b} gave {him} {x.a}, wrapped in three leaves and a lot of string.",
        "{c} and {b} had made {him} {x.a}, and it had taken them a whole week.",
    )
    t.quote(t.a, "I thought that you had forgotten!", "You did not forget!")
    t.quote(
        t.b,
        "How could we forget you?",
        "It was very hard not to tell you.",
        "Forget? We have been talking of nothing else.",
    )
    t.close(
        "{a} had never had a better birthday, once it got started.",
        "{a} fell asleep that night with {x.the} in {his} arms.",
        "and at the end of the evening it really was washing day, because somebody had to do all "
        "the dishes.",
    )


def flood(t: Teller) -> None:
    """The river rises, and an odd boat saves the day."""
    t.fields["tub"] = t.rng.choice(
        ("bathtub", "washtub", "big wooden door", "kitchen table", "rain barrel", "wheelbarrow")
    )
    t.open()
    t.say(
        "it had rained for three days, and the river was rising.",
        "that spring it rained and rained, until the frogs said that it was enough.",
        "{when}, after a week of rain, the river came over its banks.",
    )
    t.say(
        "first the water came into the garden, and then it knocked on the door.",
        "the water was {p.at}, where no water should be.",
        "the meadow was a lake, and the footpath was a brook.",
    )
    t.say(
        "then {a} heard a thin voice. It was {c.intro}, up on a roof.",
        "from far away somebody was calling. {c.intro} was sitting in the top of a tree.",
        "{c.intro} was standing on an old stump, and the stump was getting smaller.",
    )
    t.quote(t.c, "Help!", "I cannot swim!", "My feet are getting wet!")
    t.quote(
        t.a,
        "We need a boat, and we need it now.",
        "Hold on! I am coming!",
        "Stay there! Well, where else would you go.",
    )
    t.say(
        "but there was no boat. There was only {b.intro} and an old {tub}.",
        "{b.intro} came running with the only thing that {b.he} could find, a {tub}.",
        '"I have a {tub}," said {b.intro}. "It floats. I think it floats."',
    )
    t.say(
        "they climbed in. {a} paddled with {x.a}, and {b} paddled with a frying pan.",
        "{a} sat in front and {b} sat behind, and they rowed with two brooms.",
    )
    t.say(
        "the {tub} turned around and around, and they saw everything at least twice.",
        "a branch went by, and a chair, and a hen on a hat.",
        "the waves were high, but {a} kept {his} eyes on {c}.",
    )
    t.maybe(
        '"I feel ill," said {b}. "Row," said {a}.',
        '"We have a leak," said {b}, and {b.he} sat on it.',
    )
    t.say(
        "at last they reached {c}, and {c.he} jumped right into {a.name}'s arms.",
        "{a} held out one {a.hand}, and {c} slid down into the {tub}.",
    )
    t.say(
        "they brought {c} to the hill, where everyone was waiting with {food}.",
        "up on the hill there was a fire, and a blanket, and a great deal of {food}.",
    )
    _thanks(t, t.c, t.a)
    t.maybe(
        "then the rain stopped, as if it had only waited for that.",
        "the next day the sun came out, and the river went back to bed.",
    )
    t.close(
        "the {tub} now hangs over {b.name}'s door, and it is never, ever used for anything else.",
        "{c} learned to swim that summer, and {a} held {c.his} {c.hand}.",
        "and the river was very quiet for a long time, as if it was a little sorry.",
    )


SKILLS: tuple[tuple[str, str, str, str], ...] = (
    ("swim", "{he} sank like a stone", "{he} swam in a circle", "Breathe first, then kick."),
    ("whistle", "only air came out", "there was a sound like a sad kettle",
     "Think of something round."),
    ("dance", "{he} fell over {his} own feet", "{he} stepped on a passing frog",
     "Do not count. Listen."),
    ("juggle", "an apple fell on {his} head", "all the apples rolled into the river",
     "Begin with one. One is plenty."),
    ("row", "the boat went backward", "{he} lost an oar", "Use both oars at the same time."),
    ("skate", "{he} sat down at once", "{he} slid into a snowman",
     "Bend your knees, and let the ice do the work."),
    ("bake bread", "it came out as hard as a brick", "it grew until it lifted the lid off the "
     "oven", "You are in too much of a hurry. Let it sleep first."),
    ("play the fiddle", "it sounded like a gate", "it sounded like two gates",
     "Hold the bow as if it were a small bird."),
    ("ride a bicycle", "{he} rode into a haystack", "{he} rode into the same haystack",
     "Look where you want to go, and not at the haystack."),
    ("tell a joke", "nobody laughed", "somebody cried",
     "Do not laugh before the end, and leave out the part about the turnip."),
    ("fly a kite", "it fell into the pond", "it got caught in a tree",
     "Wait for the wind. It will tell you when."),
)  # fmt: skip


def learning(t: Teller) -> None:
    """Somebody cannot do a thing, and cannot do it, and then can."""
    skill, first, second, advice = t.rng.choice(SKILLS)
    t.fields.update(skill=skill, first=t.fill(first), second=t.fill(second))
    t.open()
    t.say(
        "more than anything else, {a} wanted to learn to {skill}.",
        "everyone could {skill}, it seemed to {a}, except {a}.",
        "{a} had a dream. {He} wanted to {skill}.",
    )
    t.say(
        "{when}, {he} went to {p} to try.",
        "{when}, {he} tried it for the first time.",
        "so {when}, {a} began.",
    )
    t.say("{he} tried, but {first}.", "the first time, {first}.")
    t.say("{he} tried again, and {second}.", "the second time, {second}.")
    t.maybe(
        "the ducks looked away, to be polite.",
        "a cow came over to watch.",
        "somewhere a frog laughed.",
        '"Hm," said {a}.',
    )
    t.quote(t.a, "I will never learn it.", "I give up!", "Maybe I am just not made for it.")
    t.aside()
    t.say(
        "old {b.intro} had seen it all from the bank.",
        "{b.intro} put down {b.his} newspaper.",
        "{b.intro}, who could {skill} better than anyone, came over and sat down.",
    )
    t.quote(
        t.b,
        "Do you know how many times I failed? I stopped counting.",
        "That was very bad. So was I, when I began.",
        "You are not bad at it. You are only not good at it yet.",
    )
    t.quote(t.b, advice)
    t.say(
        "so they practiced every day, in the sun and in the rain.",
        "every evening {b} came, and every evening it went a little better.",
        "{a} tried ten times, and then ten times more.",
    )
    t.say(
        "and then, on a day like any other, it worked.",
        "one evening {a} tried once more, and it simply went well.",
    )
    t.quote(t.a, "Look, {b}! Look at me!", "I can do it!", "Did you see that?")
    t.maybe("{b} had to wipe {b.his} eyes.", "{b} clapped and clapped.", "even the cow was glad.")
    t.close(
        'now {a} teaches the little ones to {skill}, and {he} always starts with "{b} once told '
        'me."',
        "they say that {a} can {skill} in {his} sleep now, but nobody has tried to find out.",
        '"What shall I learn next?" asked {a}, and {b} picked up {b.his} newspaper again.',
    )


def bottle(t: Teller) -> None:
    """A letter comes down the river in a bottle, and an answer goes back up."""
    t.open_on_the_day(
        "{who} saw a bottle float past {p}.",
        "{who} found a green bottle {p.at}.",
        "something went clink against {a.name}'s boat. It was a bottle."
        if t.habit
        else "{who} fished a bottle out of the river.",
    )
    t.aside()
    t.say("there was a letter in it.", "inside it there was a piece of paper, rolled up tightly.")
    t.say(
        'the letter said, "I live far up the river, and I have nobody to talk to. {b}."',
        'it said, "Is anybody there? I am {b}, and I would like to know."',
        'the letter said, "My name is {b}. I like {food}. What do you like?"',
    )
    t.say(
        "{a} read it three times. Then {he} looked for a pencil.",
        "{a} wanted to write back at once.",
    )
    t.say("but a bottle cannot float up a river.", "but how do you send a bottle up the river?")
    t.say(
        "{he} asked {c.intro}, who was going that way with a load of {cargo}.",
        "luckily {c.intro} flew past every Friday, or at least walked past.",
        '{c.intro} knew the answer. "Give it to me. I go up the river every week."',
    )
    t.say(
        'so {a} wrote, "Dear {b}, I am here, and my name is {a}."',
        "{a} wrote a long letter about {q}, and the weather, and {food2}.",
    )
    t.say(
        "the answer came down in a bottle, and the next letter went up with {c}, and so it went "
        "all summer.",
        "a week later there was another bottle, and the week after that there were two.",
    )
    t.maybe(
        "{b} wrote about the mountains, and {a} wrote about the sea.",
        "they told each other everything, even the embarrassing things.",
        "once {b} sent {him} {x.a}, and it only just fit into the bottle.",
    )
    t.say(
        "then, for a whole month, no bottle came, and {a} sat by the river every day.",
        "when autumn came, the bottles stopped, and {a} was worried.",
    )
    t.say(
        "at last something came down the river, but it was too big for a bottle.",
        "then {he} saw something bigger than a bottle coming around the bend.",
    )
    t.say(
        "it was a little boat, and in it sat {b.an} with a suitcase.",
        "it was a raft, and on it stood {b.an}, waving with both arms.",
    )
    t.quote(
        t.b,
        "I had too much to say for one bottle, so I came myself.",
        "I am {b}. Are you {a}?",
        "I ran out of bottles!",
    )
    t.say(
        "{a} laughed and helped {b.him} out of the boat.",
        '"You are just as I thought you would be," said {a}.',
        "they had {food} together, and they talked until the stars came out.",
    )
    t.close(
        "the first bottle stands on {a.name}'s table, and there is always a flower in it.",
        "{b} stayed, and now they write to each other from one side of the table to the other.",
        "and sometimes they still put a letter into the river, in case somebody is listening.",
    )


def broken(t: Teller) -> None:
    """A borrowed thing breaks, and the truth mends more than the thing."""
    t.open_on_the_day(
        "{who} borrowed {x.a} from {b.intro}.",
        '{who} asked {b.intro}, "May I borrow your {x.full}?"',
    )
    t.quote(
        t.b,
        "Take good care of it, please.",
        "Of course. It was my grandfather's.",
        "You can have it until tomorrow.",
    )
    t.say(
        "{a} was very careful with {x.the}, until {he} was not.",
        "{a} carried it home as if it were an egg.",
        "all day long {a} was careful.",
    )
    t.aside()
    t.say(
        "{p.at} {he} tripped over a root, and there was a terrible crack.",
        "then a goose ran between {his} feet, and {x.the} fell on a stone.",
        "{he} put it down for only a moment, and then {he} sat on it.",
    )
    t.say(
        "{x.the} was broken right in two.",
        "{x.the} had a long crack from one end to the other.",
    )
    t.quote(t.a, "Oh no. What will {b} say?", "Oh no!", "What have I done?")
    t.say(
        "first {he} thought of hiding it {q.at}.",
        "first {he} thought that {he} could say the goose had done it.",
        "{he} thought about moving to another river.",
    )
    t.say("{his} stomach felt as if {he} had eaten a stone.", "{he} could not eat {his} {food}.")
    t.say(
        '{c.intro} saw {his} sad face. "It will be a long night, if you wait until tomorrow."',
        '"I would tell {b.him}," said {c.intro}. "It is like cold water. Jump in quickly."',
    )
    t.say(
        "so {a} took a deep breath, and {he} knocked on {b.name}'s door.",
        "{a} walked to {b.name}'s house, and it had never been so far.",
    )
    t.quote(
        t.a,
        "I broke your {x}. I am very sorry.",
        "I am so sorry, {b}. I was not careful enough.",
    )
    t.say(
        "{b} looked at {x.the}, and then {b.he} looked at {a}.",
        "{b} said nothing for a moment.",
    )
    t.quote(
        t.b,
        "I am sad about it, but I am glad that you told me.",
        "Do you know, I broke it twice myself.",
        "A {x} can be mended. Come in.",
    )
    t.say(
        "they got out the glue, and they mended {x.the} together.",
        "they sat at the table until late, with glue on their noses, and mended it.",
    )
    t.close(
        "you can still see the crack. {b} says that it is the best part.",
        "{x.the} was a little crooked after that, but {b} liked it even better.",
        "the stone in {a.name}'s stomach was gone, and there was room for two plates of {food}.",
    )


def grumpy(t: Teller) -> None:
    """A grumpy neighbor turns out to be a lonely one."""
    t.open()
    t.say(
        "next door lived {b.intro}, who was the grumpiest neighbor on the whole river.",
        "across the water lived {b.intro}, who never said hello.",
        "everyone was a little afraid of {b.intro}, who lived {p.at}.",
    )
    t.say(
        'on {b.his} gate there was a sign. It said, "Go away."',
        '{b} had a sign on {b.his} door that said, "Not today."',
    )
    t.maybe('under it hung a smaller sign. It said, "Not tomorrow either."', chance=0.4)
    t.say(
        "{when}, {a.name}'s {x.full} fell over the fence, right into {b.name}'s garden.",
        "{when}, {a} had more {food} than {he} could eat.",
        "{when}, {a} saw {b} sitting at the window all alone.",
    )
    t.quote(t.a, "I will go and knock.", "Somebody has to say hello first.")
    t.say(
        "{his} friend {c.intro} was not happy about that.",
        "{c.intro} heard it and went pale.",
    )
    t.quote(
        t.c,
        "Are you sure? {b.He} once shouted at a cloud.",
        "I would not do that.",
        "I will wait here, behind this tree.",
    )
    t.say("but {a} went and knocked.", "{a} knocked all the same.")
    t.say(
        'the door opened just a little. "What?" said {b}.',
        'a nose came out, and then an eye. "Can you not read?" asked {b}.',
    )
    t.quote(
        t.a,
        "Good day. Would you like some {food}?",
        "I have brought you some {food}, still warm.",
        "I am {a}, and I live next door, and I have {food}.",
    )
    t.say(
        "it was quiet for a long time.",
        "{b} looked at the plate, and the plate looked at {b}.",
    )
    t.say(
        '"Nobody has knocked since I put up the sign," said {b}.',
        '"With raisins?" asked {b}. "With raisins," said {a}.',
    )
    t.say(
        "then the door opened all the way.",
        '"You had better come in," said {b}, "before it gets cold."',
    )
    t.say(
        "inside, {b} had nine clocks and {y.a}, and {b.he} had a story for each of them.",
        "inside it was full of little boats that {b} had made, and nobody had ever seen them.",
    )
    t.say(
        "{a} stayed until it was dark, and {b} laughed twice. It sounded a bit rusty.",
        "they talked all afternoon, and it turned out that {b} knew eleven good jokes.",
    )
    t.say(
        "when {c} came by the next day, {b} waved, and {c} nearly fell into the river.",
    )
    t.close(
        'now there is a new sign on the gate. It says, "Knock twice, and bring a plate."',
        "the sign is still there, but {b} has painted flowers all around it.",
        "{b} is still grumpy on Mondays, but so is everyone.",
    )


PLOTS: tuple[Callable[[Teller], None], ...] = (
    lost_and_found,
    stuck_boat,
    fair_trades,
    afraid,
    quarrel,
    the_race,
    mystery,
    invention,
    birthday,
    flood,
    learning,
    bottle,
    broken,
    grumpy,
)


def story(seed: int, index: int) -> Story:
    """Return story number ``index`` of the sequence that the seed starts."""
    rng = random.Random(f"{seed}:{index}")
    teller = Teller(rng)
    plot = rng.choice(PLOTS)
    plot(teller)
    return Story(teller.text(), plot.__name__, tuple(teller.cast))


def texts(seed: int, start: int = 0) -> Iterator[str]:
    """Yield the stories of a seed without end, from number ``start`` on."""
    return (story(seed, index).text for index in itertools.count(start))


def main() -> None:
    """Print some stories."""
    parser = argparse.ArgumentParser(
        prog="python -m models.stories",
        description=main.__doc__,
        epilog="example: python -m models.stories --count 5 --seed 2",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=3)
    args = parser.parse_args()
    for text in itertools.islice(texts(args.seed), args.count):
        print(text, end="\n\n")


if __name__ == "__main__":
    main()
