"""The vocabulary of the bundled stories: names, creatures, things, places, foods and habits."""

from __future__ import annotations

from dataclasses import dataclass

SHE_NAMES: tuple[str, ...] = (
    "Ada", "Amina", "Bibi", "Clara", "Della", "Dot", "Esme", "Fern", "Flora", "Greta",
    "Hattie", "Hazel", "Ida", "Ivy", "Josie", "Juniper", "Lottie", "Mabel", "Mina", "Nell",
    "Nora", "Olive", "Pearl", "Poppy", "Posy", "Rosa", "Tansy", "Tilly", "Una", "Vera",
    "Willa", "Wren", "Yara", "Zadie",
)  # fmt: skip
HE_NAMES: tuple[str, ...] = (
    "Alder", "Amos", "Barney", "Basil", "Bram", "Cedric", "Colin", "Edgar", "Emil", "Felix",
    "Finn", "George", "Gus", "Henry", "Hugo", "Ivo", "Jasper", "Jonah", "Kofi", "Leo",
    "Milo", "Ned", "Oscar", "Otto", "Pip", "Ravi", "Rufus", "Sam", "Theo", "Tobias",
    "Victor", "Walter", "Wilbur", "Yusuf",
)  # fmt: skip


def with_article(noun: str) -> str:
    """Return the noun phrase with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True)
class Character:
    """A character of a story; the name alone decides the pronouns."""

    name: str
    kind: str
    hand: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_she(self) -> bool:
        return self.name in SHE_NAMES

    @property
    def he(self) -> str:
        """Subject pronoun."""
        return "she" if self.is_she else "he"

    @property
    def him(self) -> str:
        """Object pronoun."""
        return "her" if self.is_she else "him"

    @property
    def his(self) -> str:
        """Possessive determiner."""
        return "her" if self.is_she else "his"

    @property
    def himself(self) -> str:
        """Reflexive pronoun."""
        return "herself" if self.is_she else "himself"

    @property
    def He(self) -> str:
        """Subject pronoun at the start of a sentence."""
        return self.he.capitalize()

    @property
    def an(self) -> str:
        """The kind with its article: "an otter"."""
        return with_article(self.kind)

    @property
    def intro(self) -> str:
        """Name and kind: "Hazel the otter"."""
        return f"{self.name} the {self.kind}"


ANIMALS: tuple[tuple[str, str], ...] = (
    ("otter", "paw"), ("beaver", "paw"), ("hedgehog", "paw"), ("mouse", "paw"),
    ("badger", "paw"), ("mole", "paw"), ("hare", "paw"), ("squirrel", "paw"),
    ("water vole", "paw"), ("fox", "paw"), ("bear", "paw"), ("cat", "paw"),
    ("heron", "wing"), ("duck", "wing"), ("goose", "wing"), ("kingfisher", "wing"),
    ("owl", "wing"), ("swan", "wing"), ("frog", "foot"), ("toad", "foot"), ("turtle", "foot"),
)  # fmt: skip
PEOPLE: tuple[str, ...] = (
    "miller", "baker", "ferry keeper", "gardener", "clockmaker", "lock keeper", "painter",
    "boat builder", "beekeeper", "fiddler",
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A thing that can be owned, lost, lent and found."""

    noun: str
    look: str
    nest: bool = False

    def __str__(self) -> str:
        return self.noun

    @property
    def a(self) -> str:
        """Looks and noun with an article: "a red kite"."""
        return with_article(f"{self.look} {self.noun}")

    @property
    def the(self) -> str:
        """Noun with the definite article: "the kite"."""
        return f"the {self.noun}"

    @property
    def full(self) -> str:
        """Looks and noun: "red kite"."""
        return f"{self.look} {self.noun}"


LOOKS: tuple[str, ...] = (
    "red", "blue", "green", "yellow", "purple", "orange", "white", "little", "shiny", "old",
    "silver", "tiny", "fine", "golden",
)  # fmt: skip
PLAIN_THINGS: tuple[str, ...] = (
    "kite", "lantern", "whistle", "umbrella", "bell", "button", "ribbon", "drum", "flute",
    "map", "key", "spoon", "toy boat", "music box", "spinning top", "ball", "compass",
    "paintbrush", "pillow", "book", "feather", "shell", "marble", "clock", "mirror", "net",
    "thimble", "pocket watch", "candlestick", "trumpet", "flag", "spyglass", "walking stick",
    "fiddle", "comb", "necklace",
)  # fmt: skip
NEST_THINGS: tuple[str, ...] = (
    "hat", "basket", "bucket", "kettle", "teapot", "cup", "scarf", "mitten", "blanket", "boot",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A place along the river, with its preposition."""

    name: str
    preposition: str

    def __str__(self) -> str:
        return self.name

    @property
    def at(self) -> str:
        """Preposition and place: "under the stone bridge"."""
        return f"{self.preposition} {self.name}"


PLACES: tuple[Place, ...] = tuple(
    Place(name, preposition)
    for preposition, names in (
        (
            "by",
            "the old mill|the river bend|the duck pond|the waterfall|the village well|"
            "the willow tree|the big gray rock|the garden wall|the beaver dam|the lock gate|"
            "the boathouse|the mill wheel|the apple trees|the crooked gate",
        ),
        ("under", "the stone bridge|the chestnut tree|the hazel bushes|the old jetty"),
        (
            "at",
            "the ferry landing|the market|the bakery|the harbor|the clock tower|"
            "the boatyard|the crossroads|the schoolhouse|the edge of the woods",
        ),
        (
            "on",
            "the little island|the wooden bridge|the sandy bank|the hill|the footpath|"
            "the village green|the long dock",
        ),
        (
            "in",
            "the reeds|the meadow|the orchard|the hay barn|the cabbage patch|the rose garden|"
            "the tall grass|the pine woods",
        ),
    )
    for name in names.split("|")
)

HOMES: tuple[str, ...] = (
    "in a crooked house by the river",
    "in a small blue boat",
    "under the roots of an old willow",
    "in a cottage beside the mill",
    "at the bend of a slow green river",
    "on a houseboat with a red chimney",
    "near the ferry landing",
    "in a round little house on the hill",
    "at the end of a very muddy lane",
    "across the river from the bakery",
    "in a tall thin house by the lock",
    "beside a stream that never stopped talking",
    "in an old boathouse full of spoons",
    "under a bridge with a very good view",
    "in a little green house with a leaky roof",
    "on an island the size of a tablecloth",
    "above the clockmaker's shop",
    "between the mill and the meadow",
)

ASIDES: tuple[str, ...] = (
    "a dragonfly sat down on {his} nose and thought about it.",
    "somewhere a cow said something long and sad.",
    "the river went on talking to itself.",
    "a cloud in the shape of a teapot went by.",
    "two geese were arguing about the way south.",
    "a leaf came down and landed on {his} head.",
    "the bell in the tower rang eleven, although it was only ten.",
    "a fish jumped, and looked surprised.",
    "far away somebody was practicing the trumpet.",
    "a snail overtook {him}, which does not happen often.",
    "it smelled of mud and mint.",
    "the sun came out from behind a cloud to have a look.",
    "a swallow wrote something in the air, but nobody could read it.",
    "a small crab walked by sideways, as if it had not seen anything.",
    "on the other bank a goat was eating somebody's hat.",
    "a bee flew by with its pockets full.",
)

FOODS: tuple[str, ...] = (
    "blackberry pie", "warm bread", "honey cake", "apple dumplings", "pear tart", "onion soup",
    "ginger cookies", "cheese toast", "pumpkin soup", "jam tarts", "walnut bread", "poppy seed cake",
    "cherry buns", "carrot cake", "potato pancakes", "rice pudding", "mushroom pie",
    "buttered corn",
)  # fmt: skip

BAKED: tuple[str, ...] = (
    "blackberry pie", "warm bread", "honey cake", "pear tart", "cheese toast", "walnut bread",
    "carrot cake", "poppy seed cake", "mushroom pie",
)  # fmt: skip

CARGOES: tuple[str, ...] = (
    "pumpkins", "turnips", "cabbages", "flower pots", "blankets", "apples", "onions",
    "wheels of cheese", "sacks of flour", "pillows", "jars of honey", "rubber boots",
    "watermelons", "teapots",
)  # fmt: skip

WHENS: tuple[tuple[str, str], ...] = (
    ("one foggy morning", "The fog lay on the river like a blanket."),
    ("one sunny morning", "The river was full of little pieces of sun."),
    ("one windy morning", "The wind was in a playful mood and pulled at everything."),
    ("one cold morning", "There was frost on the grass and everyone's breath made clouds."),
    ("one rainy morning", "The rain tapped on every roof, as if it wanted to come in."),
    ("one morning in spring", "The first flowers were out, and the frogs were singing."),
    ("one morning in autumn", "Yellow leaves floated down the river like tiny boats."),
    ("one summer afternoon", "It was so warm that even the fish looked sleepy."),
    ("one quiet afternoon", "Nothing moved but a dragonfly."),
    ("one bright afternoon", "The sky was blue from one end to the other."),
    ("one day", ""),
    ("one morning", ""),
    ("one Tuesday", ""),
    ("one Saturday", ""),
    ("early one morning", "The birds were only just awake."),
)


@dataclass(frozen=True)
class Habit:
    """What a hero is known for, and the last line that comes back to it."""

    verb: str
    closings: tuple[str, ...]


HABITS: tuple[Habit, ...] = (
    Habit("counted everything", (
        "That night {a} counted all the good things about the day, and fell asleep before "
        "{he} reached ten.",
        "{a} counted {his} friends that evening, and there were more than {he} had thought.",
    )),
    Habit("hummed all day long", (
        "And {a} hummed all the way home, a little louder than usual.",
        "Everyone was humming by the time they went home, and nobody knew who had started it, "
        "except {a}.",
    )),
    Habit("was never on time", (
        "{a} was late for supper, of course, but for once nobody minded.",
        "\"You are late,\" said the moon, or so it seemed to {a}, and {he} only smiled.",
    )),
    Habit("collected smooth stones", (
        "On the way home {a} found one more smooth stone, and kept it to remember the day.",
        "{a} put a new stone on the shelf that night, right in the middle.",
    )),
    Habit("wore a very large hat", (
        "{a} took off {his} very large hat and bowed, and a surprised sparrow flew out of it.",
        "That night {a} hung up {his} very large hat and slept like a stone.",
    )),
    Habit("asked a great many questions", (
        "That night {a} had only one question left. \"Can we do it again tomorrow?\"",
        "{a} asked no more questions that day, which surprised everyone, even {a}.",
    )),
    Habit("liked a long nap", (
        "Then {a} lay down and had the nap that {he} had been thinking about all day.",
        "{a} slept very late the next day, and everyone agreed that it was a well-earned nap.",
    )),
    Habit("talked to the moon", (
        "That night {a} told the moon all about it, and the moon, as always, was a good "
        "listener.",
        "\"Good night, moon,\" said {a} at last. \"You missed a very good day.\"",
    )),
    Habit("was very small and very brave", (
        "{a} was still very small, but that evening {he} felt exactly tall enough.",
        "From then on, when something needed a very small and very brave helper, they sent "
        "for {a}.",
    )),
    Habit("wrote everything down in a notebook", (
        "That night {a} opened {his} notebook and wrote, \"Today was a good one.\"",
        "{a} wrote it all down, and it filled four pages and a half.",
    )),
    Habit("grumbled about everything", (
        "\"I suppose it was not the worst day,\" grumbled {a}, and that was the nicest thing "
        "{he} had ever said.",
        "{a} tried to grumble about it all, but {he} could not think of a single complaint.",
    )),
    Habit("was always hungry", (
        "Then {a} had supper, and after that {he} had another supper, because {he} had earned "
        "it.",
        "\"All this has made me hungry,\" said {a}, and nobody was surprised.",
    )),
    Habit("told the same joke every day", (
        "Then {a} told {his} joke again, and this time everyone laughed.",
        "That evening {a} told a new joke at last, and it was even worse than the old one.",
    )),
    Habit("knew every duck on the river by name", (
        "That evening {a} told the whole story to the ducks, one by one, by name.",
        "The ducks heard all about it from {a}, and they quacked in all the right places.",
    )),
    Habit("sneezed whenever {he} was happy", (
        "{a} looked around at {his} friends, and sneezed four times.",
        "\"Are you catching a cold?\" someone asked. \"No,\" said {a}, and sneezed. \"I am "
        "only happy.\"",
    )),
    Habit("could not keep a secret", (
        "{a} told the whole story to everyone on the river before bedtime.",
        "\"Do not tell anyone,\" they all said, but by bedtime {a} had told everyone.",
    )),
    Habit("worried about everything", (
        "That night {a} tried to find something to worry about, and fell asleep trying.",
        "\"And I was worried!\" said {a}, and {he} laughed until {he} had to sit down.",
    )),
    Habit("drank tea on the roof", (
        "That evening there was tea on the roof for everyone, and the chimney kept it warm.",
        "{a} climbed up on the roof with a cup of tea and looked at the river for a long time.",
    )),
    Habit("said good morning to every tree", (
        "On the way home {a} said good night to every tree, and it took until midnight.",
        "The next day {a} said good morning to every tree, and it sounded to {him} as if one of "
        "them answered.",
    )),
    Habit("always wore two different socks", (
        "That night {a} hung up {his} two different socks, side by side, like good friends.",
        "And somewhere along the way {a} had lost a sock, so that now they were more different "
        "than ever.",
    )),
    Habit("walked backward on Tuesdays", (
        "The next day was a Tuesday, and {a} walked backward through the whole village, waving.",
        "{a} walked home backward, although it was no Tuesday, so as to see {his} friends a "
        "little longer.",
    )),
    Habit("made up songs about soup", (
        "That night {a} made up a song about friends. It was very much like the one about soup.",
        "{a} made up a song about it all, and there was a little soup in the last verse.",
    )),
    Habit("dreamed of seeing the sea", (
        "\"The sea can wait,\" thought {a}. \"It is very nice right here.\"",
        "That night {a} dreamed of the sea again, but this time all {his} friends were in the "
        "boat.",
    )),
    Habit("sang to the cabbages", (
        "The next day {a} sang the whole story to the cabbages, with a very long chorus.",
        "The cabbages got an extra song that evening, and they grew very well that year.",
    )),
)  # fmt: skip
