"""The closed world of the embedded model: tables of facts, and the phrasings of questions about them.

Every fact has one phrasing that is never in the training text; the evaluation uses this phrasing.
"""

from typing import NamedTuple

from training.holdout import bucket


class Fact(NamedTuple):
    """A fact: its kind, its subject, and the whole sentence that answers questions about it."""

    kind: str
    subject: str
    answer: str


# country, capital, continent, language, currency. Countries with a disputed or shared entry are left out, and a
# country with several languages gets one that is spoken there, so that every answer is true.
COUNTRIES: tuple[tuple[str, str, str, str, str], ...] = (
    ("France", "Paris", "Europe", "French", "euro"),
    ("Germany", "Berlin", "Europe", "German", "euro"),
    ("Italy", "Rome", "Europe", "Italian", "euro"),
    ("Spain", "Madrid", "Europe", "Spanish", "euro"),
    ("Portugal", "Lisbon", "Europe", "Portuguese", "euro"),
    ("Greece", "Athens", "Europe", "Greek", "euro"),
    ("Austria", "Vienna", "Europe", "German", "euro"),
    ("Belgium", "Brussels", "Europe", "Dutch", "euro"),
    ("Ireland", "Dublin", "Europe", "English", "euro"),
    ("Finland", "Helsinki", "Europe", "Finnish", "euro"),
    ("the Netherlands", "Amsterdam", "Europe", "Dutch", "euro"),
    ("Estonia", "Tallinn", "Europe", "Estonian", "euro"),
    ("Latvia", "Riga", "Europe", "Latvian", "euro"),
    ("Croatia", "Zagreb", "Europe", "Croatian", "euro"),
    ("the United Kingdom", "London", "Europe", "English", "pound"),
    ("Sweden", "Stockholm", "Europe", "Swedish", "krona"),
    ("Norway", "Oslo", "Europe", "Norwegian", "krone"),
    ("Denmark", "Copenhagen", "Europe", "Danish", "krone"),
    ("Iceland", "Reykjavik", "Europe", "Icelandic", "krona"),
    ("Poland", "Warsaw", "Europe", "Polish", "zloty"),
    ("Hungary", "Budapest", "Europe", "Hungarian", "forint"),
    ("Romania", "Bucharest", "Europe", "Romanian", "leu"),
    ("Switzerland", "Bern", "Europe", "German", "franc"),
    ("Ukraine", "Kyiv", "Europe", "Ukrainian", "hryvnia"),
    ("Japan", "Tokyo", "Asia", "Japanese", "yen"),
    ("China", "Beijing", "Asia", "Chinese", "yuan"),
    ("India", "New Delhi", "Asia", "Hindi", "rupee"),
    ("Nepal", "Kathmandu", "Asia", "Nepali", "rupee"),
    ("Thailand", "Bangkok", "Asia", "Thai", "baht"),
    ("Vietnam", "Hanoi", "Asia", "Vietnamese", "dong"),
    ("Mongolia", "Ulaanbaatar", "Asia", "Mongolian", "tugrik"),
    ("South Korea", "Seoul", "Asia", "Korean", "won"),
    ("the Philippines", "Manila", "Asia", "Filipino", "peso"),
    ("Iran", "Tehran", "Asia", "Persian", "rial"),
    ("Iraq", "Baghdad", "Asia", "Arabic", "dinar"),
    ("Egypt", "Cairo", "Africa", "Arabic", "pound"),
    ("Morocco", "Rabat", "Africa", "Arabic", "dirham"),
    ("Tunisia", "Tunis", "Africa", "Arabic", "dinar"),
    ("Kenya", "Nairobi", "Africa", "Swahili", "shilling"),
    ("Ghana", "Accra", "Africa", "English", "cedi"),
    ("Nigeria", "Abuja", "Africa", "English", "naira"),
    ("Ethiopia", "Addis Ababa", "Africa", "Amharic", "birr"),
    ("Senegal", "Dakar", "Africa", "French", "franc"),
    ("Angola", "Luanda", "Africa", "Portuguese", "kwanza"),
    ("the United States", "Washington", "North America", "English", "dollar"),
    ("Canada", "Ottawa", "North America", "English", "dollar"),
    ("Mexico", "Mexico City", "North America", "Spanish", "peso"),
    ("Cuba", "Havana", "North America", "Spanish", "peso"),
    ("Brazil", "Brasilia", "South America", "Portuguese", "real"),
    ("Argentina", "Buenos Aires", "South America", "Spanish", "peso"),
    ("Chile", "Santiago", "South America", "Spanish", "peso"),
    ("Peru", "Lima", "South America", "Spanish", "sol"),
    ("Colombia", "Bogota", "South America", "Spanish", "peso"),
    ("Uruguay", "Montevideo", "South America", "Spanish", "peso"),
    ("Australia", "Canberra", "Oceania", "English", "dollar"),
    ("New Zealand", "Wellington", "Oceania", "English", "dollar"),
)

# animal with its article, its young, the sound it makes, its number of legs.
ANIMALS: tuple[tuple[str, str, str, str], ...] = (
    ("a dog", "a puppy", "barks", "four"),
    ("a cat", "a kitten", "meows", "four"),
    ("a cow", "a calf", "moos", "four"),
    ("a horse", "a foal", "neighs", "four"),
    ("a sheep", "a lamb", "bleats", "four"),
    ("a pig", "a piglet", "oinks", "four"),
    ("a lion", "a cub", "roars", "four"),
    ("a frog", "a tadpole", "croaks", "four"),
    ("a goat", "a kid", "bleats", "four"),
    ("a duck", "a duckling", "quacks", "two"),
    ("a hen", "a chick", "clucks", "two"),
    ("an owl", "an owlet", "hoots", "two"),
    ("a goose", "a gosling", "honks", "two"),
    ("a wolf", "a pup", "howls", "four"),
    ("an elephant", "a calf", "trumpets", "four"),
)

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("day", "night"), ("up", "down"),
    ("open", "closed"), ("happy", "sad"), ("old", "young"), ("hard", "soft"), ("light", "dark"), ("full", "empty"),
    ("wet", "dry"), ("loud", "quiet"), ("rich", "poor"), ("early", "late"),
)  # fmt: skip

COLOURS: tuple[tuple[str, str], ...] = (
    ("a banana", "yellow"), ("grass", "green"), ("the sky", "blue"), ("snow", "white"), ("coal", "black"),
    ("a tomato", "red"), ("a carrot", "orange"), ("a lemon", "yellow"), ("milk", "white"), ("a flamingo", "pink"),
    ("chocolate", "brown"), ("a raven", "black"), ("a frog", "green"), ("a strawberry", "red"), ("the sea", "blue"),
)  # fmt: skip

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS: tuple[str, ...] = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

COUNTS: tuple[tuple[str, str], ...] = (
    ("days are in a week", "There are seven days in a week."),
    ("months are in a year", "There are twelve months in a year."),
    ("hours are in a day", "There are 24 hours in a day."),
    ("minutes are in an hour", "There are 60 minutes in an hour."),
    ("seconds are in a minute", "There are 60 seconds in a minute."),
    ("sides does a triangle have", "A triangle has three sides."),
    ("sides does a square have", "A square has four sides."),
    ("legs does a spider have", "A spider has eight legs."),
    ("legs does an ant have", "An ant has six legs."),
    ("wheels does a bicycle have", "A bicycle has two wheels."),
    ("fingers are on one hand", "There are five fingers on one hand."),
    ("letters are in the English alphabet", "There are 26 letters in the English alphabet."),
)

# The phrasings of one kind; {s} is the subject. Each fact has one of them held out of the training.
PHRASINGS: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {s}?", "Which city is the capital of {s}?", "Name the capital of {s}.",
        "Tell me the capital of {s}.", "Do you know the capital of {s}?", "What's the capital city of {s}?",
    ),
    "country": (
        "{s} is the capital of which country?", "Which country has the capital {s}?",
        "What country is {s} the capital of?", "Of which country is {s} the capital?",
        "Tell me the country whose capital is {s}.",
    ),
    "continent": (
        "On which continent is {s}?", "What continent is {s} in?", "Where is {s}?",
        "Tell me the continent of {s}.", "In which part of the world is {s}?",
    ),
    "language": (
        "What language is spoken in {s}?", "Which language do people speak in {s}?",
        "Name a language of {s}.", "What do people speak in {s}?", "Tell me a language that is spoken in {s}.",
    ),
    "currency": (
        "What is the currency of {s}?", "What money is used in {s}?", "Which currency does one pay with in {s}?",
        "Name the currency of {s}.", "Tell me the currency of {s}.",
    ),
    "young": (
        "What is the young of {s} called?", "What do people call the baby of {s}?", "Name the young of {s}.",
        "Tell me the name for the young of {s}.", "How is the baby of {s} called?",
    ),
    "sound": (
        "What sound does {s} make?", "How does {s} sound?", "Which noise does {s} make?",
        "Tell me the sound of {s}.", "What noise comes from {s}?",
    ),
    "legs": (
        "How many legs does {s} have?", "What is the number of legs of {s}?", "Count the legs of {s}.",
        "On how many legs does {s} walk?", "Tell me how many legs {s} has.",
    ),
    "opposite": (
        "What is the opposite of {s}?", "Name the opposite of {s}.", "Tell me the opposite of {s}.",
        "Which word is the opposite of {s}?", "Do you know the opposite of {s}?",
    ),
    "colour": (
        "What colour is {s}?", "Which colour does {s} have?", "Tell me the colour of {s}.",
        "What is the colour of {s}?", "What color is {s}?",
    ),
    "after": (
        "What comes after {s}?", "Which one follows {s}?", "Tell me what comes after {s}.", "What is next after {s}?",
        "What follows {s}?",
    ),
    "before": (
        "What comes before {s}?", "Which one is right before {s}?", "Tell me what comes before {s}.",
        "What is just before {s}?", "What precedes {s}?",
    ),
    "count": (
        "How many {s}?", "Tell me, how many {s}?", "Do you know how many {s}?", "Please tell me how many {s}.",
        "I wonder how many {s}.",
    ),
}  # fmt: skip


def capitalised(sentence: str) -> str:
    """Return the sentence with its first letter in upper case and the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def _country_facts() -> list[Fact]:
    """Return the five facts of every country."""
    facts = []
    for country, capital, continent, language, currency in COUNTRIES:
        facts += [
            Fact("capital", country, f"The capital of {country} is {capital}."),
            Fact("country", capital, f"{capital} is the capital of {country}."),
            Fact("continent", country, capitalised(f"{country} is in {continent}.")),
            Fact("language", country, f"{language} is spoken in {country}."),
            Fact("currency", country, f"The currency of {country} is the {currency}."),
        ]
    return facts


def _cycle_facts(names: tuple[str, ...]) -> list[Fact]:
    """Return the facts about the successor and predecessor of every name in a cycle such as the days of the week."""
    facts = []
    for i, name in enumerate(names):
        after, before = names[(i + 1) % len(names)], names[i - 1]
        facts.append(Fact("after", name, f"{after} comes after {name}."))
        facts.append(Fact("before", name, f"{before} comes before {name}."))
    return facts


def _all_facts() -> tuple[Fact, ...]:
    """Return every fact of the closed world, in a fixed order."""
    facts = _country_facts()
    for animal, young, sound, legs in ANIMALS:
        facts.append(Fact("young", animal, capitalised(f"the young of {animal} is called {young}.")))
        facts.append(Fact("sound", animal, capitalised(f"{animal} {sound}.")))
        facts.append(Fact("legs", animal, capitalised(f"{animal} has {legs} legs.")))
    facts += [Fact("opposite", a, f"The opposite of {a} is {b}.") for a, b in OPPOSITES]
    facts += [Fact("opposite", b, f"The opposite of {b} is {a}.") for a, b in OPPOSITES]
    facts += [Fact("colour", thing, capitalised(f"{thing} is {colour}.")) for thing, colour in COLOURS]
    facts += _cycle_facts(DAYS) + _cycle_facts(MONTHS)
    facts += [Fact("count", subject, answer) for subject, answer in COUNTS]
    return tuple(facts)


FACTS: tuple[Fact, ...] = _all_facts()


def held_out_phrasing(fact: Fact) -> str:
    """Return the question about the fact that is never in the training text."""
    phrasings = PHRASINGS[fact.kind]
    return phrasings[bucket(f"{fact.kind}:{fact.subject}", len(phrasings))].format(s=fact.subject)


def training_phrasings(fact: Fact) -> list[str]:
    """Return every question about the fact that may be in the training text."""
    asked = [phrasing.format(s=fact.subject) for phrasing in PHRASINGS[fact.kind]]
    return [question for question in asked if question != held_out_phrasing(fact)]
