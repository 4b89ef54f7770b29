"""Write the conversations of both ladders; the files are the same on every machine.

python projects/ladder/write_data.py --output data/ladder
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

Exchange = tuple[str, str]  # question and answer
SHOWN, HELD_OUT = 400, 200  # sums whose answers are shown, and sums that no training step contains
OPEN = {"(": ")", "[": "]", "{": "}"}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# Names and goods; the last third of each is for held-out sentences only.
NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gwen", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Ned", "Ola",
    "Pia", "Quinn", "Rob", "Sue", "Tom", "Uma", "Vera", "Walt", "Zoe",
)  # fmt: skip
GOODS = (
    "red apples", "blue pens", "wool socks", "tea cups", "clay pots", "old books", "paper kites", "silver coins",
    "cotton shirts", "garden chairs", "wax candles", "oak shelves", "toy trains", "iron nails", "rice bags",
    "green pears", "brass bells", "straw hats", "glass jars", "silk scarves", "chess sets", "olive trees",
    "copper pans", "picture frames",
)  # fmt: skip
SENTENCES = (
    "{who} bought {count} {what} for {price} dollars on {day}.",
    "On {day}, {who} paid {price} dollars for {count} {what}.",
    "For {price} dollars, {who} got {count} {what} on {day}.",
    "{who} went to the market on {day} and came back with {count} {what}, which cost {price} dollars.",
)
ASKED = "Write this sentence as JSON with the keys who, count, what, price and day: {}"


def sums(rng: random.Random) -> tuple[list[Exchange], list[Exchange], list[Exchange]]:
    """Return all sums of three digits in three parts: with shown answers, for rewards only, and held out."""
    every = [(f"What is {a} + {b} + {c}?", str(a + b + c)) for a, b, c in itertools.product(range(10), repeat=3)]
    rng.shuffle(every)
    return every[:SHOWN], every[SHOWN:-HELD_OUT], every[-HELD_OUT:]


def skills(rng: random.Random) -> Iterator[Exchange]:
    """Yield questions that a small model can learn to answer: copying, order, brackets and days."""
    while True:
        letters = rng.sample(string.ascii_lowercase, rng.randint(2, 6))
        yield f"Repeat: {' '.join(letters)}", " ".join(letters)
        yield f"What is the last letter of: {' '.join(letters)}?", letters[-1]
        opened = [rng.choice("([{") for _ in range(rng.randint(1, 4))]
        yield f"Close the brackets: {' '.join(opened)}", " ".join(OPEN[bracket] for bracket in reversed(opened))
        day = rng.randrange(7)
        yield f"Which day comes after {DAYS[day]}?", DAYS[(day + 1) % 7]


def records(rng: random.Random, held_out: bool) -> Iterator[Exchange]:
    """Yield sentences about purchases, with their content as JSON."""
    known = len(NAMES) * 2 // 3
    names, goods = (NAMES[known:], GOODS[known:]) if held_out else (NAMES[:known], GOODS[:known])
    while True:
        record = {
            "who": rng.choice(names), "count": rng.randint(2, 99), "what": rng.choice(goods),
            "price": rng.randint(2, 99), "day": rng.choice(DAYS),
        }  # fmt: skip
        yield ASKED.format(rng.choice(SENTENCES).format(**record)), json.dumps(record)


def write_rows(path: Path, exchanges: Iterable[Exchange]) -> None:
    """Write conversations of one question and its answer."""
    with path.open("w", encoding="utf-8") as file:
        for question, answer in exchanges:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def write(folder: Path) -> None:
    """Write all files to a new folder."""
    folder.mkdir(parents=True)
    shown, rewarded, held_out = sums(random.Random(0))
    spoken = [*shown * 3, *itertools.islice(skills(random.Random(1)), 2000)]
    random.Random(2).shuffle(spoken)
    write_rows(folder / "skills.jsonl", spoken)
    write_rows(folder / "sums.jsonl", rewarded)
    write_rows(folder / "sums_held_out.jsonl", held_out)
    write_rows(folder / "records.jsonl", itertools.islice(records(random.Random(3), held_out=False), 1000))
    write_rows(folder / "records_held_out.jsonl", itertools.islice(records(random.Random(4), held_out=True), 100))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    write(parser.parse_args().output)
