"""Write the prompts of the `ocr` reward: scenes that show a quoted text, one JSON object with prompt and target a line.

python tools/make_ocr_dataset.py --out dataset/ocr
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

TRAIN = {"word": 200, "pair": 2500, "triple": 1600, "number": 900}  # prompts per kind of target; each target once
TEST = {"word": 100, "pair": 200, "triple": 140, "number": 80}

ADJECTIVES = """
ancient blue brave bright broken busy calm clean clever cold common crisp curious daily dark deep double early easy
electric empty family famous fast fine first flying free fresh friendly gentle giant golden good grand great green
happy hidden high honest hot icy kind large last late lazy light little local lonely long loud lucky magic mighty
modern narrow new noble northern old open perfect plain polite proud public pure quick quiet rapid rare real red rich
royal rustic safe salty secret sharp shiny silent silver simple slow small smooth soft solid southern special spicy
spring steady strong sunny super sweet swift tall tender tiny true urban useful vintage warm western white whole wide
wild winter wise wooden young
"""
NOUNS = """
airport anchor apple autumn bakery balloon banana barber basket beach bell bicycle bird blanket boat book bottle
branch bread breeze bridge brush butter button cabin cactus camera candle canvas castle cedar cellar cheese cherry
chicken circus city clock cloud coast coffee comet cookie copper corner cotton country crystal dance desert diamond
doctor dolphin dragon dream eagle engine evening falcon farm feather ferry festival field flower forest fountain fox
friend future galaxy garden ginger glass grove guitar hammer harbor harvest hill holiday honey horizon horse hotel
house island jacket jazz journey jungle juice kitchen kite ladder lake lantern leather lemon library lighthouse lion
lobster lunch market meadow melon mirror monkey moon morning mountain museum music needle night noodle north ocean
olive orange orchard oyster paint palace panda paper parade park peach pencil pepper piano picnic pigeon pilot planet
pocket potato pumpkin puzzle quarry rabbit radio rain ranch ribbon river robot rocket roof rose sailor salad school
shadow shelter ship shore soup spider spoon square stable star station stone storm story street studio sugar summer
sunset table tailor temple theater thunder ticket tiger tomato tower town train travel treasure tulip tunnel turtle
umbrella valley velvet village violin wagon walnut water weather weekend whale willow window wolf wonder yard zebra
"""
NUMBERED = ("room", "gate", "route", "track", "exit", "floor", "bus", "studio", "hall", "number", "pier", "unit")
NUMBERS = (*range(10, 100), *range(101, 1000, 7), *range(1801, 2100, 3))

SCENES = {  # what shows the text, and where
    "a neon sign": "above the door of a bar at night",
    "a wooden sign": "at the edge of a forest",
    "a street sign": "on a corner in the rain",
    "a road sign": "beside an empty highway",
    "a shop sign": "over a narrow street",
    "a hotel sign": "on a roof at dusk",
    "a chalkboard": "outside a small restaurant",
    "a whiteboard": "in a classroom",
    "a billboard": "over a busy crossing",
    "a poster": "on a brick wall",
    "a movie poster": "in the lobby of a cinema",
    "a banner": "across the main square",
    "a flag": "on the mast of a sailing boat",
    "a book cover": "on a wooden desk",
    "a paper label": "on a jar of jam",
    "a bottle label": "on a shelf of a cellar",
    "a cardboard box": "in front of a door",
    "a coffee mug": "on a kitchen table",
    "a paper cup": "on a park bench",
    "a birthday cake": "with candles on top",
    "a T-shirt": "on a clothes line",
    "a baseball cap": "on a hook",
    "a backpack": "on a train seat",
    "a ticket": "in the hand of a child",
    "a postcard": "with a picture of the sea",
    "a sticky note": "on a computer screen",
    "a tablet screen": "in a waiting room",
    "a brass plate": "beside an office door",
    "a stone tablet": "in a ruined temple",
    "a doormat": "on the steps of a house",
    "a food truck": "parked by a beach",
    "a delivery van": "in the snow",
    "an airplane": "on a sunny runway",
    "a mural": "on the side of a warehouse",
    "a spaceship": "on the surface of Mars",
    "a robot holding a card": "in a crowded street",
    "a panda holding a sign": "in a bamboo forest",
    "a knitted scarf": "around the neck of a snowman",
    "a stained glass window": "in an old library",
    "a message in the sand": "close to the waves",
}
STYLES = ("a photo of", "a close-up of", "a painting of", "a drawing of", "a film still of", "an illustration of")
VERBS = ("that says", "that reads", "with the text", "with the writing", "showing the text")
CASES = {"UPPER": str.upper, "Title": str.title, "lower": str.lower}


def shuffled(items: Iterable, seed: int) -> list:
    """In the order of their hashes: the same in every version of everything."""
    return sorted(items, key=lambda item: hashlib.blake2b(f"{seed} {item!r}".encode()).digest())


def targets(kind: str) -> list[str]:
    """Every target of a kind, in lower case, no two alike without their spaces."""
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    made = {
        "word": [(word,) for word in (*adjectives, *nouns)],
        "pair": itertools.product(adjectives, nouns),
        "triple": [
            *((a, *pair) for a, pair in zip(itertools.cycle(adjectives), itertools.permutations(nouns, 2))),
            *((a, "and", b) for a, b in itertools.combinations(nouns, 2)),
        ],
        "number": [*((word, str(n)) for word in NUMBERED for n in NUMBERS), *((str(n),) for n in NUMBERS if n > 99)],
    }[kind]
    return list({"".join(words): " ".join(words) for words in made}.values())


def split(seed: int) -> tuple[list[dict], list[dict]]:
    """(train, test): objects with prompt and target. No target of one is, in any case and spacing, one of the other."""
    wordings = shuffled(itertools.product(STYLES, SCENES.items(), VERBS, CASES), seed)
    splits = [], []
    for kind in TRAIN:
        chosen = shuffled(targets(kind), seed)[: TEST[kind] + TRAIN[kind]]
        splits[1].extend(chosen[: TEST[kind]])
        splits[0].extend(chosen[TEST[kind] :])
    train, test = (
        [
            _worded(target, *wording)
            for target, wording in zip(shuffled(targets_of_split, seed), itertools.cycle(wordings))
        ]
        for targets_of_split in splits
    )
    return train, test


def _worded(target: str, style: str, scene: tuple[str, str], verb: str, case: str) -> dict:
    target, (thing, place) = CASES[case](target), scene
    return {"prompt": f'{style} {thing} {verb} "{target}" {place}', "target": target}


def main(out: Path, seed: int):
    out.mkdir(parents=True, exist_ok=True)
    for name, prompts in zip(("train", "test"), split(seed)):
        (out / f"{name}_metadata.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dataset/ocr"))
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    main(args.out, args.seed)
