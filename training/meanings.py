"""The meanings of the embedded world's sentences, and the wordings of each: pairs for the embedder's training.

A row of a kind is one meaning. A wording may omit a part of its row, like a question does: it fits every row that
agrees in the named parts. `|` separates the wordings of a part; the first is the usual one. One wording in five,
selected by a hash of its text, is held out of the training.
"""

import itertools
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from training import facts, stories, words
from training.corpus import invented_word
from training.facts import capitalised
from training.holdout import bucket

Row = tuple[str, ...]


class Kind(NamedTuple):
    """Meanings that share wordings: `{0}` is a row's first part. The first statement is the usual one."""

    columns: tuple[Row, ...]  # rows: their parts by place; if `is_free`, the values of each place
    statements: Row
    questions: Row
    is_free: bool = False

    def rows(self) -> Iterator[Row]:
        """Return every meaning."""
        return itertools.product(*self.columns) if self.is_free else zip(*self.columns, strict=True)

    def draw(self, rng: random.Random, count: int) -> list[Row]:
        """Draw meanings that are as similar to each other as the kind allows, which makes them hard to distinguish."""
        if not self.is_free:
            rows = list(self.rows())
            return rng.sample(rows, min(count, len(rows)))
        most = 2 + round(count ** (1 / len(self.columns)))
        rows = list(itertools.product(*(rng.sample(column, min(most, len(column))) for column in self.columns)))
        return rng.sample(rows, min(count, len(rows)))


class Text(NamedTuple):
    """A sentence and its meaning: the kind, the row, and the places of the row that the sentence names."""

    text: str
    kind: str
    row: Row
    named: frozenset[int]

    def fits(self, other: "Text") -> bool:
        """Return whether this sentence is true of the other's meaning."""
        return self.kind == other.kind and all(self.row[place] == other.row[place] for place in self.named)


def _asked(kind: str, place: int) -> Row:
    """Return the questions about facts of a kind, for the part at `place`."""
    return tuple(phrasing.format(s=f"{{{place}}}") for phrasing in facts.PHRASINGS[kind])


_, _CAPITALS, _CONTINENTS, _LANGUAGES, _CURRENCIES = zip(*facts.COUNTRIES, strict=True)
_ALSO: dict[str, str] = {
    "the United States": "the United States|the USA|America",
    "the United Kingdom": "the United Kingdom|Britain|the UK",
    "the Netherlands": "the Netherlands|Holland",
}
_COUNTRIES: Row = tuple(_ALSO.get(country[0], country[0]) for country in facts.COUNTRIES)
_ANIMALS, _YOUNG, _SOUNDS, _LEGS = zip(*facts.ANIMALS, strict=True)
_NUMBERS = {"two": "two|2", "four": "four|4"}
_COUNTED: tuple[Row, ...] = (
    ("days are in a week", "There are seven days in a week.|A week has 7 days.|A week lasts seven days."),
    ("months are in a year", "There are twelve months in a year.|A year has 12 months.|A year is twelve months long."),
    ("hours are in a day", "There are 24 hours in a day.|A day has 24 hours.|A day lasts twenty-four hours."),
    ("minutes are in an hour", "There are 60 minutes in an hour.|An hour has 60 minutes.|An hour lasts sixty minutes."),
    ("seconds are in a minute", "There are 60 seconds in a minute.|A minute has 60 seconds.|A minute: sixty seconds."),
    ("sides does a triangle have", "A triangle has three sides.|A triangle is a shape with 3 sides."),
    ("sides does a square have", "A square has four sides.|A square is a shape with 4 sides."),
    ("legs does a spider have", "A spider has eight legs.|A spider walks on 8 legs."),
    ("legs does an ant have", "An ant has six legs.|An ant walks on 6 legs."),
    ("wheels does a bicycle have", "A bicycle has two wheels.|A bike rolls on 2 wheels."),
    ("fingers are on one hand", "There are five fingers on one hand.|A hand has 5 fingers."),
    ("letters are in the English alphabet",
     "There are 26 letters in the English alphabet.|The alphabet of English has 26 letters."),
)  # fmt: skip
_ACTIVITIES: Row = (
    "keeps bees|looks after beehives|is a beekeeper", "bakes bread|is a baker|makes fresh loaves",
    "repairs bicycles|fixes bikes|mends broken bicycles", "teaches children|is a teacher|gives lessons at school",
    "grows tomatoes|has a tomato garden|plants tomatoes", "plays the piano|is a pianist|makes music on a piano",
    "plays the guitar|is a guitarist|strums a guitar", "drives a bus|is a bus driver|steers the city bus",
    "flies planes|is a pilot|steers an aeroplane", "paints pictures|is a painter|makes paintings",
    "writes books|is an author|is a writer of novels", "heals the sick|is a doctor|takes care of patients",
    "catches fish|goes fishing|is a fisher", "sells flowers|has a flower shop|is a florist",
    "builds houses|is a builder|puts up new buildings", "cooks soup|makes soup|prepares hot broth",
    "sings in a choir|is a singer|sings songs with others", "dances ballet|is a ballet dancer|performs as a dancer",
    "watches the stars|is an astronomer|looks at the night sky with a telescope",
    "collects stamps|has many stamps|keeps a stamp collection", "plays football|is a football player|kicks a ball",
    "plays chess|is a chess player|moves pawns and kings on a board", "rides horses|goes horse riding|is a rider",
    "climbs mountains|is a mountaineer|goes up high peaks", "swims in the lake|goes swimming|takes a bath in the lake",
    "runs marathons|is a long distance runner|runs very far", "reads newspapers|studies the daily news|reads the paper",
    "knits scarves|makes warm clothes of wool|knits with yarn", "sews dresses|is a tailor|makes clothes with a needle",
    "takes photographs|is a photographer|takes pictures with a camera", "repairs cars|is a mechanic|fixes engines",
    "milks cows|has a dairy farm|gets milk from cows", "keeps sheep|is a shepherd|watches over a flock",
    "feeds the birds|gives seeds to birds|puts out bird food", "walks dogs|takes dogs for a walk|goes out with dogs",
    "keeps cats|lives with cats|has several cats", "cuts hair|is a barber|is a hairdresser",
    "delivers letters|is a mail carrier|brings the post", "puts out fires|is a firefighter|works in the fire brigade",
    "catches thieves|is a police officer|works for the police", "writes programs|is a programmer|makes software",
    "studies mathematics|is a mathematician|solves equations", "studies plants|is a botanist|does research on plants",
    "digs for gold|is a gold miner|looks for gold in the ground", "sails a boat|is a sailor|goes sailing on the sea",
    "makes cheese|is a cheesemaker|turns milk into cheese", "makes chairs|is a carpenter|builds furniture of wood",
    "makes pots|is a potter|shapes bowls of clay", "tells jokes|is a comedian|makes people laugh",
    "acts in plays|is an actor|performs on the stage", "draws maps|is a mapmaker|makes charts of the land",
    "cleans windows|washes windows|is a window cleaner", "sells ice cream|has an ice cream stand|offers ice cream",
    "picks apples|gathers apples|harvests the orchard", "fixes teeth|is a dentist|cares for people's teeth",
    "guards the museum|is a museum guard|keeps watch at the museum", "lends out books|is a librarian|runs the library",
    "translates letters|is a translator|turns texts into other languages", "plays the violin|is a violinist|fiddles",
    "drives a train|is a train driver|steers the railway engine",
)  # fmt: skip
_PLACES: Row = (
    "under a stone|beneath a rock", "behind the hill|on the other side of the hill",
    "near the old bridge|close to the old bridge", "in the tall grass|where the grass is high",
    "by the river|on the bank of the river", "in a hollow tree|inside of a hollow tree",
)  # fmt: skip
_SKILLS: Row = ("sing", "swim", "dance", "paint", "read", "bake bread|make bread", "climb")
_HEROES, _HOMES = zip(*stories.HEROES, strict=True)

KINDS: dict[str, Kind] = {
    "capital": Kind(
        (_COUNTRIES, _CAPITALS),
        ("The capital of {0} is {1}.", "{1} is the capital of {0}.", "{0} has {1} as its capital.",
         "The city of {1} is the capital of {0}.", "The capital city of {0} is called {1}.",
         "The government of {0} sits in {1}.", "In {0} the capital is {1}."),
        (*_asked("capital", 0), *_asked("country", 1), "Where does the government of {0} sit?"),
    ),
    "continent": Kind(
        (_COUNTRIES, _CONTINENTS),
        ("{0} is in {1}.", "{0} lies in {1}.", "{0} is a country in {1}.", "One of the countries of {1} is {0}.",
         "You find {0} in {1}.", "{0} belongs to the continent {1}.", "The continent of {0} is {1}."),
        (*_asked("continent", 0), "Name a country in {1}.", "Which country lies in {1}?"),
    ),
    "language": Kind(
        (_COUNTRIES, _LANGUAGES),
        ("{1} is spoken in {0}.", "People in {0} speak {1}.", "The language of {0} is {1}.", "In {0} you hear {1}.",
         "Those who live in {0} talk in {1}.", "A language of {0} is {1}.", "In {0} they speak {1}."),
        (*_asked("language", 0), "Where is {1} spoken?", "In which country do people speak {1}?"),
    ),
    "currency": Kind(
        (_COUNTRIES, _CURRENCIES),
        ("The currency of {0} is the {1}.", "People in {0} pay with the {1}.", "The money of {0} is the {1}.",
         "In {0} prices are in {1}.", "The {1} is the money used in {0}.", "One pays with the {1} in {0}."),
        (*_asked("currency", 0), "Where does one pay with the {1}?", "How do I pay in {0}?"),
    ),
    "young": Kind(
        (_ANIMALS, _YOUNG),
        ("The young of {0} is called {1}.", "The baby of {0} is {1}.", "{1} is the young of {0}.",
         "{1} grows up to be {0}.", "{0} was once {1}.", "When {0} is small, it is called {1}."),
        (*_asked("young", 0), "What will {1} be when it grows up?", "What does {1} become?"),
    ),
    "sound": Kind(
        (_ANIMALS, _SOUNDS),
        ("{0} {1}.", "{0} is an animal that {1}.", "The sound of {0}: it {1}.", "You can hear how {0} {1}.",
         "The animal that {1} is {0}."),
        (*_asked("sound", 0), "Which animal {1}?", "Who {1}?"),
    ),
    "legs": Kind(
        (_ANIMALS, tuple(map(_NUMBERS.__getitem__, _LEGS))),
        ("{0} has {1} legs.", "{0} walks on {1} legs.", "The number of legs of {0} is {1}.",
         "There are {1} legs on {0}.", "{0} stands on {1} feet."),
        _asked("legs", 0),
    ),
    "opposite": Kind(
        (*zip(*facts.OPPOSITES, strict=True),),
        ("The opposite of {0} is {1}.", "The opposite of {1} is {0}.", "{0} is the opposite of {1}.",
         "{1} means the contrary of {0}.", "What is not {0} is {1}.", "{0} and {1} are opposites."),
        (*_asked("opposite", 0), *_asked("opposite", 1), "What is the contrary of {0}?"),
    ),
    "colour": Kind(
        (*zip(*facts.COLOURS, strict=True),),
        ("{0} is {1}.", "The colour of {0} is {1}.", "{0} has the color {1}.", "{1} is the colour of {0}.",
         "{0} looks {1}."),
        (*_asked("colour", 0), "What is {1}?", "Name something {1}."),
    ),
    "order": Kind(
        tuple(a + b for a, b in zip(*((names, names[1:] + names[:1]) for names in (facts.DAYS, facts.MONTHS)),
                                    strict=True)),
        ("{1} comes after {0}.", "{0} comes before {1}.", "{0} is followed by {1}.", "After {0} comes {1}.",
         "{1} follows {0}.", "Before {1} comes {0}.", "{0} is right before {1}."),
        (*_asked("after", 0), *_asked("before", 1)),
    ),
    "count": Kind((*zip(*_COUNTED, strict=True),), ("{1}",), _asked("count", 0)),
    "home": Kind(
        (_HEROES, _HOMES),
        ("The {0} lives in the {1}.", "The home of the {0} is the {1}.", "There is a {0} in the {1}.",
         "In the {1} lives a {0}.", "The {0} has its home in the {1}."),
        ("Where does the {0} live?", "Where is the home of the {0}?", "Who lives in the {1}?"),
    ),
    "age": Kind(
        (words.PERSONS, tuple(map(str, range(5, 96)))),
        ("{0} is {1} years old.", "The age of {0} is {1}.", "{0} has reached the age of {1}.", "{0} is {1}.",
         "{0} turned {1} today.", "{0} has lived for {1} years.", "At the age of {1}, {0} went to the sea."),
        ("How old is {0}?", "What is the age of {0}?", "Who is {1} years old?", "Tell me the age of {0}."),
        is_free=True,
    ),
    "activity": Kind(
        (words.PERSONS, _ACTIVITIES),
        ("{0} {1}.", "It is {0} who {1}.", "The one who {1} is {0}.", "{0}, as you know, {1}.",
         "Every week {0} {1}.", "My friend {0} {1}.", "Somebody {1}, and that is {0}."),
        ("Who {1}?", "Do you know who {1}?", "Tell me who {1}.", "Is there anyone who {1}?", "I need someone who {1}.",
         "What does {0} do?", "What is the work of {0}?", "Tell me what {0} does."),
        is_free=True,
    ),
    "found": Kind(
        (_HEROES, stories.THINGS, _PLACES),
        ("The {0} found a {1} {2}.", "A {1} was found {2} by the {0}.", "{2} the {0} saw a {1}.",
         "It was the {0} that found the {1} {2}.", "The {1} lay {2}, where the {0} found it.",
         "One day the {0} came upon a {1} {2}."),
        ("Who found the {1} {2}?", "Where did the {0} find the {1}?", "What did the {0} find {2}?",
         "Who has found a {1}?", "Where was the {1}?"),
        is_free=True,
    ),
    "learned": Kind(
        (_HEROES, _SKILLS),
        ("The {0} learned to {1}.", "The {0} can {1} now.", "Now the {0} knows how to {1}.",
         "To {1} is what the {0} has learned.", "The {0} tried every day and was able to {1} at last."),
        ("Who learned to {1}?", "Which animal can {1}?", "What did the {0} learn?", "What can the {0} do?"),
        is_free=True,
    ),
}  # fmt: skip
# Kinds are drawn in proportion; "loose" are unrelated words, for texts outside of this world.
SHARES: dict[str, float] = dict.fromkeys(KINDS, 1.0) | {
    "capital": 2, "language": 2, "currency": 2, "order": 2, "age": 2.5, "activity": 4, "found": 3, "loose": 5,
}  # fmt: skip
_LOOSE = "loose"
_GLUE: Row = tuple("the a of and in is to with on for my your not was are this that it at from".split())
_ENDINGS: Row = ("s", "ing", "er", "ed", "n")
_SMALL: frozenset[str] = frozenset(
    ("the a an of is are do does did in to that it me tell you know please what's as has was which one and").split()
)


def _held_out(text: str) -> bool:
    """Return whether a wording is held out for the evaluation."""
    return bucket(f"wording:{text}", 5) == 0


def _usual(name: str, row: Row) -> Text:
    """Return the usual sentence for a meaning, which is in the training and in the world."""
    text = KINDS[name].statements[0].format(*(part.split("|")[0] for part in row))
    return Text(capitalised(text), name, row, frozenset(range(len(row))))


def world() -> list[Text]:
    """Return the usual sentence of every meaning."""
    return [_usual(name, row) for name, kind in KINDS.items() for row in kind.rows()]


def worded(rng: random.Random, name: str, row: Row, templates: Row, held_out: bool) -> Text | None:
    """Express a meaning with one of the templates; None if no try gave a wording of the requested set."""
    usual = _usual(name, row).text
    for _ in range(20):
        template = rng.choice(templates)
        text = capitalised(template.format(*(rng.choice(part.split("|")) for part in row)))
        if text != usual and _held_out(text) == held_out:
            return Text(text, name, row, frozenset(map(int, re.findall(r"{(\d)}", template))))
    return None


def held_out_pairs(seed: int, count: int = 200) -> list[Text]:
    """Return sentences and questions in held-out wordings, the same number of each kind."""
    rng, found = random.Random(f"held-out meanings {seed}"), dict[str, Text]()
    while len(found) < count:
        for name, kind in KINDS.items():
            text = worded(rng, name, rng.choice(list(kind.rows())), kind.statements + kind.questions, held_out=True)
            if text is not None:
                found[text.text] = text
    return list(found.values())[:count]


def _bent(rng: random.Random, word: str) -> str:
    """Return a word in another form, or with a typing error."""
    at = rng.randrange(len(word))
    return rng.choice((word + rng.choice(_ENDINGS), word.rstrip("se"), word[:at] + word[at + 1 :])) or word


def _typed(rng: random.Random, text: str) -> str:
    """Return the sentence as people type it: without its mark or small words, inflected, or among other words."""
    lot, bare = rng.random(), text.rstrip("?.!")
    said = bare.split()
    if lot < 0.1:
        return " ".join(word for word in said if word.lower() not in _SMALL) or text
    if lot < 0.2 and len(bent := rng.choice(said)) > 3:
        return bare.replace(bent, _bent(rng, bent))
    if lot < 0.35:
        for _ in range(rng.randint(1, 4)):
            said.insert(rng.randint(0, len(said)), rng.choice(rng.choice((_GLUE, words.WORDS))))
        return " ".join(said)
    return bare if lot < 0.5 else text


def _loose_pair(rng: random.Random, pool: list[str]) -> tuple[Text, Text]:
    """Return random words of a pool, and the same with some left out or parts exchanged."""
    said = [
        word for _ in range(rng.randint(2, 7)) for word in (*rng.sample(_GLUE, rng.randint(0, 1)), rng.choice(pool))
    ]
    again = [word for word in said if rng.random() < 0.75] or said
    cut = rng.randrange(len(again)) if rng.random() < 0.3 else 0
    row = (" ".join(said),)
    first, second = row[0], " ".join(again[cut:] + again[:cut])
    return Text(capitalised(first) + ".", _LOOSE, row, frozenset((0,))), Text(second, _LOOSE, row, frozenset((0,)))


def _group(rng: random.Random, count: int) -> Iterator[tuple[Text, Text]]:
    """Draw pairs of one kind: a sentence or question, and a sentence with the same meaning or its answer."""
    (name,) = rng.choices(list(SHARES), list(SHARES.values()))
    if name == _LOOSE:
        pool = rng.sample(words.WORDS, 12) + [invented_word(rng) for _ in range(8)]
        yield from (_loose_pair(rng, pool) for _ in range(count))
        return
    kind = KINDS[name]
    for row in kind.draw(rng, count):
        said = worded(rng, name, row, rng.choice((kind.statements, kind.questions)), held_out=False)
        answer = worded(rng, name, row, kind.statements, held_out=False) if rng.random() < 0.5 else None
        if said is not None:
            answer = answer or _usual(name, row)
            yield said._replace(text=_typed(rng, said.text)), answer._replace(text=_typed(rng, answer.text))


def pairs(rng: random.Random, group: int = 16) -> Iterator[tuple[Text, Text]]:
    """Yield an endless stream of pairs; groups of `group` pairs are of one kind and hard to distinguish."""
    while True:
        yield from _group(rng, group)
