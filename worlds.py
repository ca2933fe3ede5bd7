"""Generated data of the embedded environments: the same in every process and for every run.

The shop's catalogue is built of near-twins so that a shopper has to read. Each of 12 product
types has 8 families (pairs of attributes), and each family four products under one title: a good
one, one that is 41-60 dollars dearer, one without the goals' colours, and one with both faults.
Titles decide attributes, the results page decides the price, the item page decides the colour.
"""

from __future__ import annotations

import random
import re
import sqlite3
from dataclasses import dataclass
from functools import cache
from itertools import combinations

WORLD_SEED = 20251122  # ours; the world does not depend on a run's seed

# type -> (department, sizes, attributes). The types' words are disjoint: sharing one would give
# a product of the wrong type a share of the reward.
TYPES = {
    "rain jacket": ("Clothing", ["small", "medium", "large"],
                    ["quick dry", "light weight", "machine washable", "slim fit", "wind proof"]),
    "yoga pants": ("Clothing", ["small", "medium", "large"],
                   ["high waist", "quick dry", "machine washable", "slim fit",
                    "moisture wicking"]),
    "winter gloves": ("Clothing", ["small", "medium", "large"],
                      ["touch screen", "wind proof", "light weight", "non slip", "fleece lined"]),
    "bed sheets": ("Home", ["twin", "queen", "king"],
                   ["machine washable", "eco friendly", "super soft", "fade resistant",
                    "easy care"]),
    "window curtains": ("Home", ["short", "regular", "tall"],
                        ["noise reducing", "easy care", "eco friendly", "hand made",
                         "energy saving"]),
    "dog harness": ("Pets", ["small", "medium", "large"],
                    ["heavy duty", "light weight", "quick release", "super soft", "night safe"]),
    "desk lamp": ("Office", [], ["energy saving", "touch screen", "space saving", "eye caring",
                                 "long lasting"]),
    "phone case": ("Electronics", [], ["heavy duty", "non slip", "slim fit", "wireless charging",
                                       "hand made"]),
    "wall clock": ("Home", [], ["battery powered", "hand made", "night safe", "space saving",
                                "noise reducing"]),
    "coffee mug": ("Kitchen", [], ["dishwasher safe", "leak proof", "hand made", "lead free",
                                   "eco friendly"]),
    "travel bag": ("Luggage", [], ["water repellent", "light weight", "heavy duty", "carry on",
                                   "space saving"]),
    "office chair": ("Furniture", [], ["height adjustable", "heavy duty", "easy assemble",
                                       "super soft", "space saving"]),
}
COLOUR_POOL = ["beige", "black", "blue", "brown", "gold", "green", "navy", "orange", "pink",
               "purple", "red", "silver", "white", "yellow"]
PLACES = ["at home", "on the road", "in the city", "for a gift", "for daily use", "in small rooms",
          "for beginners", "all year round"]
BULLETS = ["one year warranty", "packed without plastic", "designed with care", "tested by hand",
           "ships within two days", "instructions included"]
TEMPLATES = [
    "i need a {type} that is {attributes} in {options}, and price lower than {limit} dollars",
    "i am looking for a {attributes} {type} in {options}, and price lower than {limit} dollars",
    "find me a {type} with {attributes}, i want {options}, and price lower than {limit} dollars",
]
# What an instruction asks for, read back from its text.
_PATTERNS = [re.compile(template.format(type=r"(?P<type>\w+ \w+)", limit=r"(?P<limit>[\d.]+)",
                                        attributes="(?P<attributes>.+?)",
                                        options="(?P<options>.+?)"))
             for template in TEMPLATES]
_TYPE_WORDS = {word for name in TYPES for word in name.split()}


def type_words(name: str) -> list[str]:
    """The words of a product's name that say its type; the catalogue's "nouns" for the reward."""
    return [word for word in re.findall("[a-z]+", name.lower()) if word in _TYPE_WORDS]


@dataclass(frozen=True, eq=False)
class ShopWorld:
    products: list[dict]          # webshop_reward's product, with asin, price and options
    goals: dict[str, list[dict]]  # split -> webshop_reward's goals, with the instruction
    families: list[dict]          # what `draw_goal` takes; "held_out" marks the unseen ones


@cache
def shop_world() -> ShopWorld:
    """384 products and 1,152 goals; 12 families (one a type) are held out as "unseen"."""
    rng = random.Random(WORLD_SEED)
    families, products = [], []
    for name in TYPES:
        pairs = rng.sample(list(combinations(TYPES[name][2], 2)), 8)
        held_out = rng.randrange(8)
        colours = rng.sample(COLOUR_POOL, 8)
        for i, pair in enumerate(pairs):
            family = _family(rng, name, list(pair), colours, i == held_out)
            families.append(family)
            products += _twins(rng, family)
    rng.shuffle(products)  # equal scores rank by number, so the order must say nothing
    used = set()
    for product in products:
        product["asin"] = _asin(rng, used)

    seen, unseen, keys = [], [], set()
    for family in families:
        for _ in range(12):
            goal = draw_goal(rng, family, keys)
            keys.add(goal_key(goal))
            (unseen if family["held_out"] else seen).append(goal)
    rng.shuffle(seen)
    goals = {"train": seen[:600], "validation": seen[600:758], "test": seen[758:],
             "unseen": unseen}
    return ShopWorld(products, goals, families)


def _family(rng, name, attributes, colours, held_out):
    # Goals ask for `colours`; the twins without them have the type's other four.
    mine = rng.sample(colours, 4)
    price = rng.choice([p for p in range(15, 70) if p % 10])
    return dict(type=name, attributes=attributes, colours=mine, price=price, held_out=held_out,
                others=[c for c in colours if c not in mine], sizes=TYPES[name][1])


def _twins(rng, family):
    name, attributes = family["type"], family["attributes"]
    title = " ".join([*attributes, name]).title()
    # Twins must rank alike in a search, so their indexed texts are of one length.
    description = f"A {name} {rng.choice(PLACES)}."
    bullets = rng.sample(BULLETS, 2)
    twins = []
    for dear in (False, True):
        for colours in (family["colours"], family["others"]):
            price = family["price"]
            if colours is family["others"]:
                price += rng.randint(-4, 4)
            if dear:  # a limit is at most 40 dollars above the good twin's price
                price = family["price"] + rng.randint(41, 60)
            options = {"color": rng.sample(colours, 4)}
            if family["sizes"]:
                options["size"] = family["sizes"]
            twins.append({
                "name": title, "Title": title, "query": name,
                "product_category": f"{TYPES[name][0]} › {name.title()}",
                "Attributes": attributes, "BulletPoints": bullets, "Description": description,
                "options": options, "price": float(price)})
    return twins


def _asin(rng, used):
    while True:
        asin = "B0" + "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", k=8))
        if asin not in used:
            used.add(asin)
            return asin


def goal_key(goal: dict) -> tuple:
    """What a goal asks for; two goals with one key would differ in wording only."""
    return (goal["query"], frozenset(goal["attributes"]), frozenset(goal["goal_options"]),
            goal["price_upper"])


def draw_goal(rng: random.Random, family: dict, taken: set) -> dict:
    """A random goal of the family whose key is not in `taken`."""
    while True:
        attributes = rng.sample(family["attributes"], rng.choice([1, 2]))
        options = [rng.choice(family["colours"])]
        if family["sizes"] and rng.random() < 0.5:
            options.append(rng.choice(family["sizes"]))
        # WebShop's rule: the larger of two picks among the first four tens above the price.
        tens = [float(t) for t in range(10, 1000, 10) if t > family["price"]][:4]
        limit = max(rng.sample(tens, 2))
        title = " ".join([*family["attributes"], family["type"]]).title()
        goal = {"name": title, "query": family["type"],
                "product_category": f"{TYPES[family['type']][0]} › {family['type'].title()}",
                "attributes": attributes, "goal_options": options, "price_upper": limit}
        if goal_key(goal) not in taken:
            goal["instruction"] = rng.choice(TEMPLATES).format(
                type=family["type"], attributes=" and ".join(attributes),
                options=", ".join(options), limit=f"{limit:.2f}")
            return goal


# ------------------------------------------------------------------------ reading the shop's pages

def split_page(observation: str) -> list[str]:
    return re.split(r" \[SEP\] | \| ", observation)


def read_instruction(observation: str) -> dict:
    """type, attributes, options (colour first) and limit, from the first page's text."""
    match = next(match for pattern in _PATTERNS if (match := pattern.search(observation)))
    return {"type": match["type"], "attributes": match["attributes"].split(" and "),
            "options": match["options"].split(", "), "limit": float(match["limit"])}


def read_results(observation: str) -> list[tuple[str, str, float]]:
    """(asin, title, price) of the products on a results page."""
    pieces = split_page(observation)
    return [(asin, title, float(price[1:])) for asin, title, price
            in zip(pieces, pieces[1:], pieces[2:]) if re.fullmatch("B0[A-Z0-9]{8}", asin)]


def _best(results, want):
    """The results within the limit that name the most wanted attributes, in order."""
    def matches(title):
        return sum(attribute in title.lower() for attribute in want["attributes"])
    affordable = [r for r in results if r[2] <= want["limit"]]
    most = max((matches(title) for _, title, _ in affordable), default=0)
    return [r for r in affordable if matches(r[1]) == most]


# ------------------------------------------------------------------------------ the scripted expert

def shop_expert(thoughts: bool):
    """An expert that reads the pages only, full or short: observation -> reply.

    Searches the type and attributes, opens the first result within the limit with the most
    attributes, goes back for the next one if the colour is missing, clicks the options and buys.
    """
    script = None

    def reply(observation: str) -> str:
        nonlocal script
        if script is None:
            script = _expert_script(observation)
            thought, action = next(script)
        else:
            thought, action = script.send(observation)
        return f"Thought: {thought}\nAction: {action}" if thoughts else action
    return reply


def _expert_script(page):
    want = read_instruction(page)
    colour, attributes = want["options"][0], " and ".join(want["attributes"])
    page = yield (f"I should search for a {want['type']} that is {attributes}.",
                  f"search[{want['type']} {' '.join(want['attributes'])}]")
    steps = 1
    while True:
        fits = _best(read_results(page), want)
        for n, (asin, _, price) in enumerate(fits):
            page = yield (f"{asin} is {attributes} and costs {price} dollars, which is within "
                          f"{want['limit']:.2f}.", f"click[{asin}]")
            steps += 1
            more = 2 if n + 1 < len(fits) else 3  # < Prev, (Next >,) the next product
            if colour in split_page(page) or steps + more + len(want["options"]) + 1 > 10:
                for option in want["options"]:
                    if option in split_page(page):
                        yield f"I want {option}.", f"click[{option}]"
                yield "The product is what I was asked for.", "click[Buy Now]"
            yield f"It does not come in {colour}, so I go back to the results.", "click[< Prev]"
            steps += 1
        page = yield "Nothing else here fits, so I look at the next page.", "click[Next >]"
        steps += 1


# ------------------------------------------------------------------------------ noisy shoppers

# The mixture of competence: chances of each habit. `share`: of all shoppers; `asked`: searches
# for all it was asked (else for a part of it); `fits`: opens a result that fits (else any);
# `colour`: goes back when the colour is missing; `right`: clicks an option as asked (else
# another, or none); `buys`: buys what it has open (else goes on looking); `peeks`: reads a
# sub-page; `slips`: does something invalid before an action.
COMPETENCE = [
    dict(share=0.35, asked=0.85, fits=0.8, colour=0.7, right=0.9, buys=0.95, peeks=0.1, slips=0.05),
    dict(share=0.35, asked=0.6, fits=0.35, colour=0.2, right=0.75, buys=0.9, peeks=0.15, slips=0.1),
    # Wanderers search for some product of the right type: so every product gets visited.
    dict(share=0.30, asked=0.0, fits=0.0, colour=0.1, right=0.6, buys=0.6, peeks=0.4, slips=0.12),
]


def shoppers(shop, seed: int, n: int) -> list[list[dict]]:
    """n conversations of shoppers of mixed competence in `shop` (a WebShop, any view).

    A conversation is a list of {"role", "content"} that ends with the shopper's last action. The
    instructions are new ones: of no split, and of no held-out family (whose products may be seen).
    Each shopper acts on its instruction, makes mistakes and recovers, and often buys the wrong
    product; from 1,500 shoppers on every product has been opened.
    """
    world = shop.world
    rng = random.Random(f"shoppers-{seed}")
    taken = {goal_key(goal) for goals in world.goals.values() for goal in goals}
    families = [family for family in world.families if not family["held_out"]]
    targets, conversations = [], []
    for _ in range(n):
        habits = rng.choices(COMPETENCE, [c["share"] for c in COMPETENCE])[0]
        target = None
        if not habits["asked"]:
            targets = targets or rng.sample(world.products, len(world.products))
            target = targets.pop()
        family = rng.choice([f for f in families if not target or f["type"] == target["query"]])
        goal = draw_goal(rng, family, taken)
        conversations.append(_shop_trip(rng, shop, goal, habits, target))
    return conversations


def _shop_trip(rng, shop, goal, habits, target):
    page = shop.start(goal)
    messages = [{"role": "user", "content": page}]
    script = _shopper_script(rng, page, habits, target)
    action = next(script)
    while True:
        slip = _slip(rng, shop) if rng.random() < habits["slips"] else None
        messages.append({"role": "assistant", "content": slip or action})
        step = shop.step(slip or action)
        if step.done or len(messages) == 2 * shop.max_steps:
            return messages
        messages.append({"role": "user", "content": step.observation})
        if not slip:  # after a slip the page is the same: the shopper does what it meant to do
            action = script.send(step.observation)


def _slip(rng, shop):
    """An action that this page does not take."""
    links = shop.clickables()
    clicks = [rng.choice(COLOUR_POOL), rng.choice(shop.world.products)["asin"], "Search",
              "Buy Now", "Next >", "< Prev"]
    slips = [f"click[{text}]" for text in clicks if text.lower() not in links]
    if links:  # every page but the search page
        slips.append(f"search[{rng.choice(list(TYPES))}]")
    return rng.choice(slips)


def _shopper_script(rng, page, habits, target):
    want, opened = read_instruction(page), set()
    while True:
        if target:
            query = " ".join([target["query"], *target["Attributes"]])
        else:
            words = [want["type"], *want["attributes"]]
            if rng.random() > habits["asked"]:  # forgets a part, or mixes an attribute up
                mixed_up = rng.choice(["", *TYPES[want["type"]][2]])
                words[rng.randrange(1, len(words))] = mixed_up  # it always knows the type
            query = " ".join(dict.fromkeys(word for word in words if word))
        page = yield f"search[{query}]"
        results = []
        while True:
            if "(seen)" not in page:
                results = read_results(page)
            if results and not target and rng.random() < 0.1:
                page = yield "click[Next >]"
                continue
            fits = _best(results, want) if rng.random() < habits["fits"] else results
            fits = [asin for asin, _, _ in fits if asin not in opened]
            if not fits:
                yield "click[Back to Search]"
                break
            asin = target["asin"] if target else rng.choice(fits)
            target = None
            opened.add(asin)
            item = split_page((yield f"click[{asin}]"))
            if rng.random() < habits["peeks"]:
                yield f"click[{rng.choice(['Description', 'Features', 'Reviews', 'Attributes'])}]"
                yield "click[< Prev]"
            if want["options"][0] not in item and rng.random() < habits["colour"]:
                page = yield "click[< Prev]"
                continue
            shown = [v for v in item if v in COLOUR_POOL or v in TYPES[want["type"]][1]]
            for option in want["options"]:
                if option in shown and rng.random() < habits["right"]:
                    yield f"click[{option}]"
                elif rng.random() < 0.5:
                    yield f"click[{rng.choice(shown)}]"
            if rng.random() < habits["buys"]:
                yield "click[Buy Now]"
            yield "click[Back to Search]"
            break


# ------------------------------------------------------------------------------ SQL databases

# A database has a table of places and one or two of people or things, each row at a place. Names
# of tables and columns are one word each, and unique in the database, so that a small model can
# copy them. A concept has three names, of which a question and a database may use different ones,
# so that describing the table matters.
PEOPLE = "doctor teacher driver singer farmer painter lawyer pilot nurse baker actor writer".split()
THINGS = "car book phone boat lamp guitar camera kite bike clock radio sofa".split()
SITES = "town school museum farm harbor hotel island valley market castle station park".split()
HELD_OUT = {"baker", "actor", "writer", "clock", "radio", "sofa", "castle", "station", "park"}

# kind -> (names of the name column, numeric concepts, text concepts)
CONCEPTS = {
    "people": (["name"],
               [["age", "years"], ["salary", "pay", "wage"], ["score", "points", "marks"]],
               [["country", "nation", "homeland"], ["grade", "rank", "level"]]),
    "things": (["model"], [["price", "cost", "fee"], ["weight", "mass", "load"],
                           ["speed", "pace", "tempo"]],
               [["color", "shade", "tint"], ["brand", "maker", "label"]]),
    "sites": (["site"], [["area", "size", "extent"], ["seats", "rooms", "places"]],
              [["region", "zone", "district"]]),
}
VALUES = {  # of text concepts, by their first name
    "country": ["France", "Spain", "Japan", "Brazil", "Egypt", "India"],
    "grade": ["junior", "senior", "expert", "novice"],
    "color": ["red", "blue", "green", "black", "white"],
    "brand": ["Acme", "Zenith", "Orion", "Delta", "Vega"],
    "region": ["north", "south", "east", "west"],
}
NAMES = {
    "people": "Ann Bob Carl Dora Eva Finn Gina Hugo Ivan Jane Karl Lena Max Nora Otto Paul Rosa "
              "Sven Tina Uwe".split(),
    "things": "Alpha Beta Gamma Nova Astra Terra Luna Solar Turbo Prime Ultra Metro Polar Comet "
              "Pixel Spark Storm Blaze Ember Frost".split(),
    "sites": "Avon Brill Crewe Dover Esher Fowey Goole Hythe Ilam Jura Keld Leeds Masham Neath "
             "Otley Poole Ryde Settle Thame Ware".split(),
}


@dataclass(frozen=True, eq=False)
class SQLWorld:
    databases: dict[str, str]         # name -> the SQL script that makes it in sqlite
    questions: dict[str, dict[int, dict]]  # split -> number -> query (in words), gold (SQL), db


@dataclass(frozen=True)
class Column:
    concept: tuple[str, ...]  # its possible names
    name: str                 # the one this database uses
    values: tuple             # down the rows


@dataclass(frozen=True)
class Table:
    name: str
    noun: str                 # as a question says it, in the plural
    key: str
    label: Column             # the name of a person, thing or place
    numbers: tuple[Column, ...]
    texts: tuple[Column, ...]


def draw_database(rng: random.Random, nouns: set) -> list[Table]:
    """Tables of a random database over some of the nouns; the first is the place of the others."""
    style = rng.choice(["{}", "{}s", "{}_info"])
    people, things = ([n for n in pool if n in nouns] for pool in (PEOPLE, THINGS))
    kinds = [("sites", rng.choice([n for n in SITES if n in nouns]))]
    kinds += rng.sample([("people", rng.choice(people)), ("things", rng.choice(things))],
                        rng.choice([1, 2]))
    tables = []
    for kind, noun in kinds:
        label, numeric, textual = CONCEPTS[kind]
        rows = rng.randint(12, 16)
        places = len(tables[0].label.values) if tables else 0
        numbers = [Column(tuple(names), rng.choice(names), tuple(rng.sample(range(10, 100), rows)))
                   for names in rng.sample(numeric, 2)]
        texts = [Column(tuple(names), rng.choice(names),
                        tuple(rng.choices(VALUES[names[0]], k=rows)))
                 for names in rng.sample(textual, min(2, len(textual)))]
        key = f"{noun}_id"
        if tables:  # every row is at a place; the column has the name of the place's key
            at = tuple(rng.choices(range(1, places + 1), k=rows))
            texts.append(Column((), tables[0].key, at))
        tables.append(Table(style.format(noun), f"{noun}s", key,
                            Column((), label[0], tuple(rng.sample(NAMES[kind], rows))),
                            tuple(numbers), tuple(texts)))
    return tables


def database_script(tables: list[Table]) -> str:
    script = []
    for i, table in enumerate(tables):
        columns = [table.label, *table.texts, *table.numbers]
        kinds = ["int" if isinstance(c.values[0], int) else "varchar(20)" for c in columns]
        lines = [f"{table.key} int PRIMARY KEY",
                 *(f"{c.name} {kind}" for c, kind in zip(columns, kinds))]
        if i:
            lines.append(f"FOREIGN KEY ({tables[0].key}) REFERENCES {tables[0].name}")
        rows = zip(range(1, len(table.label.values) + 1), *(c.values for c in columns))
        script.append(f"CREATE TABLE {table.name} ({', '.join(lines)});\n"
                      f"INSERT INTO {table.name} VALUES {', '.join(map(str, rows))};\n")
    return "".join(script)


# Question families: (weight, question, gold). {t} is a table, {n} its label; {a}, {b} numeric
# columns; {c} a text column with the values {v} and {v2}; {x}, {y}, {z} numbers; {p} the place's
# table, {k} its key, {e} its text column with the value {u}. Weight is on families whose near
# misses earn a share of the reward. Compound questions are most of the tasks, but rare in the
# practice text: how to put conditions together is what there is to learn from experts and failures.
SIMPLE = [
    (1, "how many {t} are there", "SELECT COUNT(*) FROM {t}"),
    (1, "how many {t} have {c} {v}", "SELECT COUNT(*) FROM {t} WHERE {c} = {v}"),
    (1, "what is the average {a} of {t}", "SELECT AVG({a}) FROM {t}"),
    (1, "what is the highest {a} of {t} with {c} {v}",
     "SELECT MAX({a}) FROM {t} WHERE {c} = {v}"),
    (1, "what are the different values of {c} of {t}", "SELECT DISTINCT {c} FROM {t}"),
    (1, "how many {t} are there for each {c}", "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}"),
    (2, "list the {n} of {t} with {c} {v}", "SELECT {n} FROM {t} WHERE {c} = {v}"),
    (3, "list the {n} of {t} with {a} above {x}", "SELECT {n} FROM {t} WHERE {a} > {x}"),
    (3, "list the {n} of {t} with {a} below {x}", "SELECT {n} FROM {t} WHERE {a} < {x}"),
    (2, "list the {n} and {b} of {t} with {a} above {x}",
     "SELECT {n}, {b} FROM {t} WHERE {a} > {x}"),
    (3, "list the {n} of the {z} {t} with the highest {a}",
     "SELECT {n} FROM {t} ORDER BY {a} DESC LIMIT {z}"),
    (2, "list the {n} of the {z} {t} with the lowest {a}",
     "SELECT {n} FROM {t} ORDER BY {a} LIMIT {z}"),
    (2, "list the {n} of {t} from the highest {a} to the lowest",
     "SELECT {n} FROM {t} ORDER BY {a} DESC"),
    (2, "list the {n} of {t} with {a} above the average",
     "SELECT {n} FROM {t} WHERE {a} > (SELECT AVG({a}) FROM {t})"),
    (2, "list the {n} of {t} in {p} with {e} {u}",
     "SELECT {n} FROM {t} JOIN {p} USING ({k}) WHERE {e} = {u}"),
]
COMPOUND = [
    (3, "list the {n} of {t} with {a} above {x} and {b} below {y}",
     "SELECT {n} FROM {t} WHERE {a} > {x} AND {b} < {y}"),
    (3, "list the {n} of {t} with {a} above {x} or {b} below {y}",
     "SELECT {n} FROM {t} WHERE {a} > {x} OR {b} < {y}"),
    (3, "list the {n} of {t} with {c} {v} or {v2}",
     "SELECT {n} FROM {t} WHERE {c} = {v} OR {c} = {v2}"),
    (3, "list the {n} of {t} with {c} {v} or {a} above {x}",
     "SELECT {n} FROM {t} WHERE {c} = {v} OR {a} > {x}"),
    (3, "list the {n} of {t} with {c} {v} or {a} above {x} or {b} below {y}",
     "SELECT {n} FROM {t} WHERE {c} = {v} OR {a} > {x} OR {b} < {y}"),
    (3, "list the {n} of {t} with {c} {v} or {v2} or {a} above {x}",
     "SELECT {n} FROM {t} WHERE {c} = {v} OR {c} = {v2} OR {a} > {x}"),
    (3, "list the {n} of the {z} {t} with the highest {a} and {b} above {x}",
     "SELECT {n} FROM {t} WHERE {b} > {x} ORDER BY {a} DESC LIMIT {z}"),
    (3, "list the {n} of {t} with {a} above {x} from the lowest {b} to the highest",
     "SELECT {n} FROM {t} WHERE {a} > {x} ORDER BY {b}"),
    (3, "list the {n} of {t} with {c} {v} or {a} above {x} from the highest {b} to the lowest",
     "SELECT {n} FROM {t} WHERE {c} = {v} OR {a} > {x} ORDER BY {b} DESC"),
    (2, "list the {n} of {t} in {p} with {e} {u} or {a} above {x}",
     "SELECT {n} FROM {t} JOIN {p} USING ({k}) WHERE {e} = {u} OR {a} > {x}"),
]


def draw_question(rng: random.Random, tables: list[Table], compound: float) -> dict:
    """query and gold of a random question, a compound one with the probability given.

    The gold's result may be empty, or the same without its WHERE.
    """
    families = COMPOUND if rng.random() < compound else SIMPLE
    _, query, gold = rng.choices(families, [family[0] for family in families])[0]
    table = rng.choice(tables[1:] if "{p}" in gold else tables)
    a, b = rng.sample(table.numbers, 2)
    texts = [c for c in table.texts if c.concept]
    c, place = rng.choice(texts), tables[0]
    e = place.texts[0]
    v, v2 = rng.sample(VALUES[c.concept[0]], 2)
    parts = dict(n=table.label.name, v=f"'{v}'", v2=f"'{v2}'", u=f"'{rng.choice(e.values)}'",
                 x=rng.randint(20, 80), y=rng.randint(20, 80), z=rng.randint(2, 5), k=place.key)
    # Two thirds of the time, a question calls a column as the database does.
    said = {s: rng.choice((*column.concept, *[column.name] * 3))
            for s, column in zip("abce", (a, b, c, e))}
    return dict(query=query.format(**parts, **said, t=table.noun, p=place.noun),
                gold=gold.format(**parts, a=a.name, b=b.name, c=c.name, e=e.name, t=table.name,
                                 p=place.name))


@cache
def sql_world() -> SQLWorld:
    """360 databases with 5 questions each: train, validation, test (new databases), unseen.

    unseen: databases over nouns that no training task names. Every gold has rows, at most 300
    characters of them, and leaving its WHERE out would earn at most 0.7.
    """
    rng = random.Random(WORLD_SEED + 1)
    all_nouns = {*PEOPLE, *THINGS, *SITES}
    databases, questions, drawn = {}, {}, set()
    for split, count in (("train", 200), ("validation", 60), ("test", 60), ("unseen", 40)):
        questions[split] = []
        nouns = HELD_OUT if split == "unseen" else all_nouns - HELD_OUT
        while len(questions[split]) < 5 * count:
            tables = draw_database(rng, nouns)
            script = database_script(tables)
            if schema_key(script) in drawn:
                continue
            drawn.add(schema_key(script))
            name = f"{tables[0].key[:-3]}_{len(databases) + 1}"
            databases[name] = script
            con, asked = sqlite3.connect(":memory:"), set()
            con.executescript(script)
            while len(asked) < 5:
                question = draw_question(rng, tables, 0.7)
                if question["query"] not in asked and _worth_asking(con, question["gold"]):
                    asked.add(question["query"])
                    questions[split].append(dict(question, db=name))
            con.close()
        rng.shuffle(questions[split])
    return SQLWorld(databases, {s: dict(enumerate(found)) for s, found in questions.items()})


def schema_key(script: str) -> frozenset:
    """What a database is: its tables and their columns, in any order."""
    return frozenset(frozenset(re.findall(r"\w+", line))
                     for line in re.findall(r"CREATE TABLE .*", script))


def _worth_asking(con, gold):
    rows = con.execute(gold).fetchall()
    if not rows or rows[0][0] is None or len(str(rows)) > 300:
        return False
    if " WHERE " not in gold:
        return True
    lazy = con.execute(re.sub(r" WHERE .*", "", gold)).fetchall()
    return len(rows) / len(lazy) <= 0.7 and rows != lazy or len(rows) == 1 and rows != lazy


def tables_of(gold: str) -> list[str]:
    """The tables a query reads from, in order."""
    return list(dict.fromkeys(re.findall(r"\b(?:from|join)\s+`?(\w+)", gold, re.I)))


def sql_expert(gold: str, thoughts: bool):
    """An expert that knows the gold query: looks at the tables, describes those it needs, submits.

    thoughts: in ReAct form, else bare queries.
    """
    needed = tables_of(gold)[:7]  # so that query and submission fit into 10 turns
    turns = [("I should see which tables there are.", "SHOW TABLES")]
    turns += [(f"I need to know the columns of {table}.", f"DESC {table}") for table in needed]
    turns += [(f"I can answer from {' and '.join(needed)}.", gold),
              ("The result answers the question.", "submit")]
    script = iter(turns)

    def reply(observation: str) -> str:
        thought, action = next(script)
        if not thoughts:
            return action
        block = action if action == "submit" else f"\n```sql\n{action}\n```"
        return f"Thought: {thought}\nAction: {block}"
    return reply


# ------------------------------------------------------------------------------ noisy analysts

# Habits, as the shoppers have. `looks`: asks for the tables first; `describes`: the table it needs
# (else it takes a column to be called as the question says); `right`: writes the query as asked
# (else with one mistake); `recovers`: after an error looks at what is there and tries again;
# `checks`: looks at something else once more after its query, so that it submits the wrong thing.
ANALYSTS = [
    dict(share=0.40, looks=0.95, describes=0.98, right=0.8, recovers=0.9, checks=0.05),
    dict(share=0.40, looks=0.8, describes=0.85, right=0.5, recovers=0.8, checks=0.15),
    dict(share=0.20, looks=0.5, describes=0.5, right=0.3, recovers=0.6, checks=0.3),
]


def analysts(env, seed: int, n: int) -> list[list[dict]]:
    """n conversations of analysts of mixed competence with `env` (an InterCodeSQL in sqlite).

    A conversation is a list of {"role", "content"} that ends with the analyst's last action. The
    databases are new ones, over all nouns (so a small model has seen every word), none with the
    tables and columns of a split's; the analysts make mistakes, recover, and often submit a wrong
    result.
    """
    rng, nouns = random.Random(f"analysts-{seed}"), {*PEOPLE, *THINGS, *SITES}
    taken = {schema_key(script) for script in env.world.databases.values()}
    conversations = []
    while len(conversations) < n:
        tables = draw_database(rng, nouns)
        script = database_script(tables)
        if schema_key(script) in taken:
            continue
        for _ in range(min(4, n - len(conversations))):
            question = dict(draw_question(rng, tables, 0.02), db=f"{tables[0].key[:-3]}_0")
            habits = rng.choices(ANALYSTS, [a["share"] for a in ANALYSTS])[0]
            observation = env.start(question, script)
            messages = [{"role": "user", "content": observation}]
            actions = _analyst_script(rng, tables, question, habits)
            action = next(actions)
            while True:
                messages.append({"role": "assistant", "content": action})
                step = env.step(action)
                if step.done or len(messages) == 2 * env.max_steps:
                    break
                messages.append({"role": "user", "content": step.observation})
                action = actions.send(step.observation)
            conversations.append(messages)
    return conversations


def _analyst_script(rng, tables, question, habits):
    gold = question["gold"]
    needed = [t for t in tables if t.name in tables_of(gold)]
    if rng.random() < habits["looks"]:
        yield "SHOW TABLES"
    described = rng.random() < habits["describes"]
    if described:
        for table in needed:
            if rng.random() < 0.1:  # the wrong table first
                yield f"DESC {rng.choice(tables).name}"
            yield f"DESC {table.name}"
    query = gold if described else _guess(rng, gold, needed)
    if rng.random() > habits["right"]:
        query = _mistake(rng, query, needed)
    for _ in range(3):
        page = yield query
        if not page.startswith("Error"):
            break
        if rng.random() > habits["recovers"]:
            yield "submit"
        if "doesn't exist" in page:
            yield "SHOW TABLES"
        if "Unknown column" in page or "doesn't exist" in page:
            for table in needed:
                yield f"DESC {table.name}"
        query = gold
    if rng.random() < habits["checks"]:
        yield rng.choice([f"DESC {needed[0].name}", "SHOW TABLES",
                          f"SELECT * FROM {rng.choice(tables).name} LIMIT 2"])
    while True:
        yield "submit"


def _guess(rng, gold, needed):
    """The query of one who has not looked: table and columns as the words come to mind."""
    for table in needed:
        if rng.random() < 0.3:
            gold = re.sub(rf"\b{table.name}\b", rng.choice([table.noun, table.noun[:-1]]), gold)
        for column in (*table.numbers, *(t for t in table.texts if t.concept)):
            gold = re.sub(rf"\b{column.name}\b", rng.choice(column.concept), gold)
    return gold


def _mistake(rng, query, needed):
    """The query with one mistake: of those that this query can have."""
    table = needed[0]
    columns = [c.name for c in (*table.numbers, *table.texts)]
    edits = [
        lambda q: re.sub(r" WHERE .*", "", q),
        lambda q: re.sub(r" (AND|OR) .*", "", q),
        lambda q: q.replace(" AND ", " OR ") if " AND " in q else q.replace(" OR ", " AND "),
        lambda q: q.replace(">", "<", 1) if ">" in q else q.replace("<", ">", 1),
        lambda q: q.replace(" DESC", ""),
        lambda q: re.sub(r"LIMIT \d", f"LIMIT {rng.randint(1, 6)}", q),
        lambda q: re.sub(r"([<>]) \d+", rf"\1 {rng.randint(20, 80)}", q, count=1),
        lambda q: re.sub("|".join(rf"\b{c}\b" for c in columns), rng.choice(columns), q, count=1),
        lambda q: re.sub(r"SELECT \w+", f"SELECT {rng.choice(columns)}", q, count=1),
        lambda q: re.sub(rf" FROM {table.name}", "", q, count=1),
        lambda q: q.replace("SELECT", "SELECT *" if rng.random() < 0.5 else "SELECT FROM", 1),
    ]
    changed = [edit(query) for edit in edits]
    changed = [q for q in changed if q != query]
    return rng.choice(changed)


# ------------------------------------------------------------------------------ ScienceWorld

def science_actions(gold: list[str]) -> list[str]:
    """The simulator's solution, looking around wherever it acts.

    The solution walks without looking where it is, so nobody could tell from what is read why it
    goes where it goes. What it does to doors, which are open, is left out.
    """
    actions, looked = ["look around"], True
    for action in gold:
        moves = action.startswith(("go to", "teleport to"))
        if action.startswith("open door") or (action == "look around" and looked):
            continue
        if not (moves or looked or action == "look around"):
            actions.append("look around")
        actions.append(action)
        looked = not moves
    return actions


def science_expert(gold: list[str], thoughts: bool, timed: bool = False):
    """An expert that plays `science_actions`, naming things as it has read them (see `as_shown`).

    timed: it plays the solution as it is, because each step counts or the names change. Once its
    actions are over it only looks around.
    """
    script, shown = iter(gold if timed else science_actions(gold)), []

    def reply(observation: str) -> str:
        shown[:0] = things_in(observation)
        action = next(script, "look around")
        action = action if timed else as_shown(action, shown)
        return f"Thought: {_science_thought(action)}\nAction: {action}" if thoughts else action
    return reply


def things_in(observation: str) -> list[str]:
    """The names of the things that a description of a room shows, as in "a dove egg"."""
    named = r"(?:^\t|: |, |\()(?:a|an) (?!substance called)([a-z]+(?:[ -][a-z]+)*(?: \d+)?)"
    return re.findall(named, observation, re.M)


def as_shown(action: str, shown: list[str]) -> str:
    """The action with its first thing called as shown, not as the simulator calls it in solutions.

    "focus on egg dove" is "focus on dove egg", "move egg dove egg in inventory to red box" is "move
    dove egg to red box". A name that was not shown, or fits several things, is left.
    """
    match = re.fullmatch(r"(focus on|pick up|move) (.+?)(?: in inventory)?( to .+)?", action)
    if not match:
        return action
    words = set(re.sub(" containing .*", "", match[2]).split())
    same = [name for name in shown if set(name.split()) == words]
    more = {name for name in shown if set(name.split()) > words}
    name = same[0] if same else more.pop() if len(more) == 1 else None
    return f"{match[1]} {name}{match[3] or ''}" if name else action


def _science_thought(action: str) -> str:
    verb, _, object = action.partition(" ")
    return {"look": "I should see what is here.",
            "go": f"What I need next is on the way through the {object[3:]}.",
            "teleport": f"What I need next is in the {object[3:]}.",
            "focus": f"The task is about the {object[3:]}.",
            "pick": f"I need to carry the {object[3:]}.",
            "wait": "This takes time.", "wait1": "This takes time.",
            }.get(verb, f"The next step is to {action}.")


# Habits, as of the shoppers. `right`: does what the solution does next; else it slips: `wanders`
# through a door and comes back, `focuses` on something (mostly wrong, which ends the episode), or
# does something else to what it sees.
EXPLORERS = [
    dict(share=0.3, right=0.9, wanders=0.3, focuses=0.15),
    dict(share=0.3, right=0.7, wanders=0.3, focuses=0.1),
    dict(share=0.4, right=0.35, wanders=0.25, focuses=0.05),
]


def explorer(env, seed: int, k: int) -> list[dict]:
    """Conversation number k of an explorer of random competence with `env` on a training task.

    A list of {"role", "content"} that ends with the explorer's last action. Few solve their task;
    they lose their way and come back, and do what has no effect.
    """
    rng = random.Random(f"explorer-{seed}-{k}")
    habits = rng.choices(EXPLORERS, [e["share"] for e in EXPLORERS])[0]
    messages = [{"role": "user", "content": env.reset(rng.choice(env.tasks("train")))}]
    actions = _explorer_script(rng, science_actions(env.gold()), habits)
    action = next(actions)
    for _ in range(env.max_steps):
        messages.append({"role": "assistant", "content": action})
        step = env.step(action)
        if step.done:
            return messages
        messages.append({"role": "user", "content": step.observation})
        action = actions.send(step.observation)
    return messages[:-1]


def _explorer_script(rng, solution, habits):
    room, doors, objects, shown = "hallway", ["kitchen"], ["air"], []

    def read(observation):
        nonlocal room, doors, objects
        shown[:0] = things_in(observation)
        if moved := re.search(r"You move to the ([\w ]+)\.", observation):
            room = moved[1]
        if seen := re.search(r"called the ([\w ]+)\.", observation):
            room = seen[1]
            doors = re.findall(r"A door to the ([\w ]+)", observation) or doors
            objects = things_in(observation) or objects

    for action in solution:
        while rng.random() > habits["right"]:
            thing, slip = rng.choice(objects), rng.random()
            if slip < habits["wanders"]:
                home = room
                read((yield f"go to {rng.choice(doors)}"))
                if rng.random() < 0.5:
                    read((yield "look around"))
                if room != home:
                    read((yield f"go to {home}"))
            elif slip < habits["wanders"] + habits["focuses"]:
                read((yield f"focus on {thing}"))
            else:
                read((yield rng.choice([f"pick up {thing}", f"examine {thing}", "look around",
                                        f"go to {rng.choice(doors)}", "inventory",
                                        f"move {thing} to {rng.choice(objects)}", action])))
        read((yield as_shown(action, shown)))
    while True:
        yield "look around"
