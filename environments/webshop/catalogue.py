"""The embedded shop's catalogue and goals, the same for every run, and its scripted expert.

Near-twins make a shopper read. Each of 12 product types has 8 families (pairs of attributes), and
each family four products under one title: a good one, one that is 41-60 dollars dearer, one without
the goals' colours, and one with both faults. Titles decide attributes, the results page decides the
price, the item page decides the colour.
"""

import random
import re
import string
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from envs import Stuck

DATA_SEED = 20251122  # ours; the data do not depend on a run's seed

SIZES = {"worn": ["small", "medium", "large"], "beds": ["twin", "queen", "king"],
         "windows": ["short", "regular", "tall"], "-": []}
# type -> (department, sizes, attributes). The types' words are disjoint: sharing one would give
# a product of the wrong type a share of the reward.
TYPES = {}
for line in """\
rain jacket; Clothing; worn; quick dry, light weight, machine washable, slim fit, wind proof
yoga pants; Clothing; worn; high waist, quick dry, machine washable, slim fit, moisture wicking
winter gloves; Clothing; worn; touch screen, wind proof, light weight, non slip, fleece lined
bed sheets; Home; beds; machine washable, eco friendly, super soft, fade resistant, easy care
window curtains; Home; windows; noise reducing, easy care, eco friendly, hand made, energy saving
dog harness; Pets; worn; heavy duty, light weight, quick release, super soft, night safe
desk lamp; Office; -; energy saving, touch screen, space saving, eye caring, long lasting
phone case; Electronics; -; heavy duty, non slip, slim fit, wireless charging, hand made
wall clock; Home; -; battery powered, hand made, night safe, space saving, noise reducing
coffee mug; Kitchen; -; dishwasher safe, leak proof, hand made, lead free, eco friendly
travel bag; Luggage; -; water repellent, light weight, heavy duty, carry on, space saving
office chair; Furniture; -; height adjustable, heavy duty, easy assemble, super soft, space saving
""".splitlines():
    name, department, sizes, attributes = line.split("; ")
    TYPES[name] = department, SIZES[sizes], attributes.split(", ")
COLOUR_POOL = ("beige black blue brown gold green navy orange pink purple red silver white "
               "yellow").split()
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
_PATTERNS = [re.compile(template.format(
    type=r"(?P<type>\w+ \w+)", attributes="(?P<attributes>.+?)", options="(?P<options>.+?)",
    limit=r"(?P<limit>\d+(\.\d+)?)")) for template in TEMPLATES]
_TYPE_WORDS = {word for name in TYPES for word in name.split()}


def type_words(name: str) -> list[str]:
    """The words of a product's name that say its type; the catalogue's "nouns" for the reward."""
    return [word for word in re.findall("[a-z]+", name.lower()) if word in _TYPE_WORDS]


@dataclass(frozen=True, eq=False)
class ShopData:
    products: list[dict]          # webshop_reward's product, with asin, options and its family's
    goals: dict[str, list[dict]]  # split -> webshop_reward's goals, with the instruction
    families: list[dict]          # what `draw_goal` takes: what its products share


@cache
def shop_data() -> ShopData:
    """384 products and 1,152 goals; the products of 12 families (one a type) are held out, for the
    split "unseen". Goals that differ in their price limit only are in one split."""
    rng = random.Random(DATA_SEED)
    families = []
    products = []
    for name, (_, _, attributes) in TYPES.items():
        pairs = rng.sample(list(combinations(attributes, 2)), 8)
        held_out = rng.randrange(8)
        colours = rng.sample(COLOUR_POOL, 8)
        for i, pair in enumerate(pairs):
            family = _family(rng, name, list(pair), colours, i == held_out)
            families.append(family)
            products += _twins(rng, family)
    rng.shuffle(products)  # equal scores rank by number, so the order must say nothing
    for made in products:  # as it happens, no two are alike
        made["asin"] = "B0" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))

    goals = {"unseen": []}
    alike = defaultdict(list)  # what is asked for, whatever the limit -> the goals
    taken = set()
    for family in families:
        for _ in range(12):
            goal = draw_goal(rng, family, taken, products)
            taken.add(goal_key(goal))
            same = goals["unseen"] if family["held_out"] else alike[goal_key(goal)[:-1]]
            same.append(goal)
    groups = list(alike.values())
    rng.shuffle(groups)
    for split, size in (("train", 600), ("validation", 158), ("test", 250)):
        goals[split] = []
        for group in [*groups]:
            if len(goals[split]) + len(group) <= size:
                goals[split] += group
                groups.remove(group)
        rng.shuffle(goals[split])
    return ShopData(products, goals, families)


def _family(rng, name, attributes, colours, held_out):
    # Goals ask for `colours`; the twins without them have the type's other four.
    mine = rng.sample(colours, 4)
    price = rng.choice([p for p in range(15, 70) if p % 10])
    title = " ".join([*attributes, name]).title()
    return {"name": title, "Title": title, "query": name, "Attributes": attributes, "price": price,
            "product_category": f"{TYPES[name][0]} › {name.title()}", "held_out": held_out,
            "sizes": TYPES[name][1], "colours": mine,
            "others": [c for c in colours if c not in mine]}


def _twins(rng, family):
    # They rank alike in a search, since their indexed texts are of one length.
    shared = family | dict(Description=f"A {family['query']} {rng.choice(PLACES)}.",
                           BulletPoints=rng.sample(BULLETS, 2))
    for dear, colours in product((False, True), (family["colours"], family["others"])):
        price = family["price"]
        if colours is family["others"]:
            price += rng.randint(-4, 4)
        if dear:  # a limit is at most 40 dollars above the good twin's price
            price = family["price"] + rng.randint(41, 60)
        options = {"color": rng.sample(colours, 4)}
        if family["sizes"]:
            options["size"] = family["sizes"]
        yield shared | {"options": options, "price": float(price)}


def listed_as_fitting(product: dict, goal: dict) -> bool:
    """Whether the results page says that the product fits: its kind, attributes and price."""
    return (product["query"] == goal["query"] and product["price"] <= goal["price_upper"]
            and {*goal["attributes"]} <= {*product["Attributes"]})


def meets(product: dict, goal: dict) -> bool:
    """Whether the product, with the right options, earns the whole reward."""
    offered = sum(product["options"].values(), [])
    return listed_as_fitting(product, goal) and {*goal["goal_options"]} <= {*offered}


def goal_key(goal: dict) -> tuple:
    """What a goal asks for, price last; two goals with one key would differ in wording only."""
    return (goal["query"], frozenset(goal["attributes"]), frozenset(goal["goal_options"]),
            goal["price_upper"])


def draw_goal(rng: random.Random, family: dict, taken: set, products: list[dict]) -> dict:
    """A random goal of the family, of no key in `taken`; of the products that are listed as
    fitting all are held out or none is, as the family."""
    while True:
        attributes = rng.sample(family["Attributes"], rng.choice([1, 2]))
        options = [rng.choice(family["colours"])]
        if family["sizes"] and rng.random() < 0.5:
            options.append(rng.choice(family["sizes"]))
        goal = goal_for(rng, family, attributes, options)
        sides = {p["held_out"] for p in products if listed_as_fitting(p, goal)}
        if goal_key(goal) not in taken and sides == {family["held_out"]}:
            return goal | {"instruction": instruction_of(rng, goal)}


def goal_for(rng: random.Random, item: dict, attributes: list[str], options: list[str]) -> dict:
    """A goal that asks for a product, or one of a family, at a price limit, in no words yet."""
    # WebShop's rule: the larger of two picks among the first four tens above the price.
    tens = [float(t) for t in range(10, 1000, 10) if t > item["price"]][:4]
    return {"name": item["Title"], "query": item["query"],
            "product_category": item["product_category"], "attributes": attributes,
            "goal_options": options, "price_upper": max(rng.sample(tens, 2))}


def instruction_of(rng: random.Random, goal: dict) -> str:
    return rng.choice(TEMPLATES).format(
        type=goal["query"], attributes=" and ".join(goal["attributes"]),
        options=", ".join(goal["goal_options"]), limit=f"{goal['price_upper']:.2f}")


def split_page(observation: str) -> list[str]:
    return re.split(r" \[SEP\] | \| ", observation)


def read_instruction(observation: str) -> dict:
    """type, attributes, options (colour first) and limit of an instruction of TEMPLATES; Stuck
    where there is none on the page."""
    for pattern in _PATTERNS:
        match = pattern.search(observation)
        if match:
            return {"type": match["type"], "attributes": match["attributes"].split(" and "),
                    "options": match["options"].split(", "), "limit": float(match["limit"])}
    raise Stuck(f"no instruction in {observation[:80]!r}")


def read_results(observation: str) -> list[tuple[str, str, float]]:
    """(asin, title, price) of the products on a results page."""
    pieces = split_page(observation)
    results = []
    for asin, title, price in zip(pieces, pieces[1:], pieces[2:]):
        if re.fullmatch("B0[A-Z0-9]{8}", asin) and re.fullmatch(r"\$\d+(\.\d+)?", price):
            results.append((asin, title, float(price[1:])))
    return results


def fitting(results, want):
    """The results within the limit that name the most wanted attributes, in order."""
    by_matches = defaultdict(list)
    for asin, title, price in results:
        if price <= want["limit"]:
            matches = sum(attribute in title.lower() for attribute in want["attributes"])
            by_matches[matches].append((asin, title, price))
    return by_matches[max(by_matches, default=0)]


def shop_expert(thoughts: bool):
    """An expert that reads the pages only: it opens the first result within the limit with the most
    attributes, goes back for the next if the colour is missing, clicks the options and buys."""
    script = _expert_script()
    next(script)

    def reply(observation: str) -> str:
        thought, action = script.send(observation)
        return f"Thought: {thought}\nAction: {action}" if thoughts else action
    return reply


def _expert_script():
    want = read_instruction((yield))
    colour, attributes = want["options"][0], " and ".join(want["attributes"])
    page = yield (f"I should search for a {want['type']} that is {attributes}.",
                  f"search[{want['type']} {' '.join(want['attributes'])}]")
    steps = 1
    while True:
        fits = fitting(read_results(page), want)
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
