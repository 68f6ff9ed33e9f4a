"""The grammar of the short stories: a hero, a thing and a friend are drawn once and stay the same to the end."""

import random

# hero, the hero's home
HEROES: tuple[tuple[str, str], ...] = (
    ("fox", "forest"), ("rabbit", "meadow"), ("bear", "forest"), ("cat", "village"), ("dog", "farm"),
    ("mouse", "old barn"), ("owl", "tall oak tree"), ("frog", "green pond"), ("duck", "green pond"),
    ("horse", "farm"), ("squirrel", "tall oak tree"), ("hedgehog", "garden"), ("turtle", "quiet river"),
    ("dragon", "high mountain"), ("robot", "little town"), ("wolf", "dark forest"),
)  # fmt: skip

NAMES: tuple[str, ...] = (
    "Pip", "Luna", "Milo", "Ruby", "Otto", "Nina", "Bruno", "Daisy", "Felix", "Tilly", "Hugo", "Poppy",
)  # fmt: skip

THINGS: tuple[str, ...] = (
    "red kite", "golden key", "warm scarf", "shiny coin", "blue ball", "silver bell", "little boat", "torn map",
)  # fmt: skip

PLACES: tuple[str, ...] = (
    "under a stone", "behind the hill", "near the old bridge", "in the tall grass", "by the river", "in a hollow tree",
)  # fmt: skip

_OPENINGS: tuple[str, ...] = (
    "Once upon a time there was a {adjective} {hero} named {name}. {name} lived in {a_home}.",
    "Once upon a time, in {a_home}, there lived a {adjective} {hero} named {name}.",
    "There was once a {adjective} {hero} who lived in {a_home}. The name of the {hero} was {name}.",
)

_LOST: tuple[tuple[str, ...], ...] = (
    ("{name} had a {thing} and loved it very much.", "The {thing} was the best thing that {name} had."),
    ("One day the {thing} was gone.", "One morning {name} woke up and could not find the {thing}."),
    ("{name} looked everywhere but did not see it.", "{name} was very sad and began to cry."),
    ("Then {a_friend} came by and said, \"I will help you.\"", "{A_friend} heard this and wanted to help."),
    ("They looked for a long time, and at last they found the {thing} {place}.",
     "Together they searched all day and found the {thing} {place}."),
    ("{name} was so happy that they danced.", "\"Thank you!\" said {name}. \"You are a good friend.\""),
)  # fmt: skip

_FOUND: tuple[tuple[str, ...], ...] = (
    ("One day {name} went for a walk and found a {thing} {place}.", "One sunny day {name} saw a {thing} {place}."),
    ('"Whose {thing} is this?" asked {name}.', "{name} wondered who had lost the {thing}."),
    ("{name} asked everyone, but nobody knew.", "{name} walked from door to door and asked."),
    ("At last {name} met {a_friend} who was crying.", "In the evening {name} met a sad {friend}."),
    ('"That is my {thing}!" said the {friend}.', "The {friend} had lost the {thing} in the rain."),
    ("{name} gave it back, and the {friend} smiled.", "{name} gave the {thing} to the {friend} with a smile."),
)

_LEARNED: tuple[tuple[str, ...], ...] = (
    ("{name} wanted to learn how to {skill}.", "More than anything, {name} wanted to {skill}."),
    ('"You are too small," said the others.', "At first it did not go well at all."),
    ('But {a_friend} said, "Try again, a little every day."', 'Then {a_friend} said, "I can show you."'),
    ("So {name} tried every morning.", "Day after day, {name} tried again."),
    ("After a week {name} could {skill}.", "One day it worked, and {name} could {skill}."),
    ("Everyone clapped, and {name} was proud.", '"I did it!" said {name}.'),
)

_ENDINGS: tuple[str, ...] = (
    "From that day on, {name} and the {friend} were best friends.",
    "And they lived happily ever after.",
    "That night {name} slept well and had sweet dreams. The end.",
    "And so {name} learned that it is good to have a friend.",
)

_ADJECTIVES: tuple[str, ...] = ("little", "brave", "kind", "clever", "shy", "happy")

_SKILLS: tuple[str, ...] = ("sing", "swim", "dance", "paint", "read", "bake bread", "climb")


def with_article(noun: str) -> str:
    """Return the noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(rng: random.Random, hero: str | None = None) -> str:
    """Write one story, about the given hero if one is given."""
    homes = dict(HEROES)
    hero = hero or rng.choice(HEROES)[0]
    friend = rng.choice([other for other, _ in HEROES if other != hero])
    words = {
        "hero": hero,
        "a_home": with_article(homes[hero]),
        "name": rng.choice(NAMES),
        "thing": rng.choice(THINGS),
        "place": rng.choice(PLACES),
        "adjective": rng.choice(_ADJECTIVES),
        "skill": rng.choice(_SKILLS),
        "friend": friend,
        "a_friend": with_article(friend),
        "A_friend": with_article(friend).capitalize(),
    }
    plot = rng.choice((_LOST, _FOUND, _LEARNED))
    sentences = [rng.choice(_OPENINGS), *(rng.choice(choices) for choices in plot), rng.choice(_ENDINGS)]
    return " ".join(sentences).format(**words)
