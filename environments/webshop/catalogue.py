"""The catalogue and goals of the built-in WebShop, the same in every run, and its scripted expert.

The catalogue consists of near-twins, so an agent has to read the pages to find the right product.
Each of the 12 product types has 8 families, which differ in a pair of attributes. Each family has
four products with the same title: a good one, one that costs 41 to 60 dollars more, one without the
colours that goals request, and one with both faults. The titles show the attributes, the results
page shows the price, and only the item page shows the colours.
"""

import random
import re
import string
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from envs import Stuck

DATA_SEED = 20251122  # the seed of the generated data, which do not depend on a run's seed [ours]

SIZES = {"worn": ["small", "medium", "large"], "beds": ["twin", "queen", "king"],
         "windows": ["short", "regular", "tall"], "-": []}
# Type -> (department, sizes, attributes). No two types share a word, because a shared word would
# give a product of the wrong type a part of the reward.
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
# Patterns that read the parts of an instruction back from its text
_PATTERNS = [re.compile(template.format(
    type=r"(?P<type>\w+ \w+)", attributes="(?P<attributes>.+?)", options="(?P<options>.+?)",
    limit=r"(?P<limit>\d+(\.\d+)?)")) for template in TEMPLATES]
_TYPE_WORDS = {word for name in TYPES for word in name.split()}


def type_words(name: str) -> list[str]:
    """Returns the words of a product's name that name its type. The reward uses them in place of
    the nouns that the official code finds with a tagger."""
    return [word for word in re.findall("[a-z]+", name.lower()) if word in _TYPE_WORDS]


@dataclass(frozen=True, eq=False)
class ShopData:
    """The products and goals of a built-in WebShop."""
    # Products in the form that `webshop_reward` takes, with the fields of their family, options and
    # asin, the product number
    products: list[dict]
    # Split -> its goals in the form that `webshop_reward` takes, with instructions
    goals: dict[str, list[dict]]
    # The fields that the products of each family share. `draw_goal` takes them.
    families: list[dict]


@cache
def shop_data() -> ShopData:
    """Generates 384 products and 1,152 goals.

    One family of each type is held out: its goals are the split "unseen". Goals that differ only in
    their price limit are in the same split.
    """
    # 1. Generate the products.
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
    # Products with equal search scores rank by index, so their order must not depend on the family.
    rng.shuffle(products)
    for item in products:  # with this seed, all product numbers are different
        item["asin"] = "B0" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))

    # 2. Draw 12 goals of each family.
    goals = {"unseen": []}
    by_request = defaultdict(list)  # the key of a goal without its price limit -> goals
    used_keys = set()
    for family in families:
        for _ in range(12):
            goal = draw_goal(rng, family, used_keys, products)
            used_keys.add(goal_key(goal))
            group = goals["unseen"] if family["held_out"] else by_request[goal_key(goal)[:-1]]
            group.append(goal)

    # 3. Fill the other splits with whole groups.
    groups = list(by_request.values())
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
    # Goals request one of `colours`. The twins with the wrong colours have the type's other four.
    own_colours = rng.sample(colours, 4)
    price = rng.choice([p for p in range(15, 70) if p % 10])
    title = " ".join([*attributes, name]).title()
    return {"name": title, "Title": title, "query": name, "Attributes": attributes, "price": price,
            "product_category": f"{TYPES[name][0]} › {name.title()}", "held_out": held_out,
            "sizes": TYPES[name][1], "colours": own_colours,
            "others": [c for c in colours if c not in own_colours]}


def _twins(rng, family):
    # The texts that the search indexes have the same length, so all twins get equal scores.
    shared = family | dict(Description=f"A {family['query']} {rng.choice(PLACES)}.",
                           BulletPoints=rng.sample(BULLETS, 2))
    for expensive, colours in product((False, True), (family["colours"], family["others"])):
        price = family["price"]
        if colours is family["others"]:
            price += rng.randint(-4, 4)
        if expensive:  # the limit of a goal is at most 40 dollars above the good twin's price
            price = family["price"] + rng.randint(41, 60)
        options = {"color": rng.sample(colours, 4)}
        if family["sizes"]:
            options["size"] = family["sizes"]
        yield shared | {"options": options, "price": float(price)}


def listed_as_fitting(product: dict, goal: dict) -> bool:
    """Returns True if a product has the type, the attributes and the price that a goal requests.
    The results page shows all three."""
    return (product["query"] == goal["query"] and product["price"] <= goal["price_upper"]
            and {*goal["attributes"]} <= {*product["Attributes"]})


def meets(product: dict, goal: dict) -> bool:
    """Returns True if a product with the right options gets the reward 1."""
    options = sum(product["options"].values(), [])
    return listed_as_fitting(product, goal) and {*goal["goal_options"]} <= {*options}


def goal_key(goal: dict) -> tuple:
    """Returns all that a goal requests, with the price limit last. Goals with the same key differ
    only in their wording."""
    return (goal["query"], frozenset(goal["attributes"]), frozenset(goal["goal_options"]),
            goal["price_upper"])


def draw_goal(rng: random.Random, family: dict, used_keys: set, products: list[dict]) -> dict:
    """Draws a goal that a product of the family meets.

    Its key is not in `used_keys`. The products that `listed_as_fitting` accepts for the goal are
    all held out if the family is held out, and otherwise none of them is.
    """
    while True:
        attributes = rng.sample(family["Attributes"], rng.choice([1, 2]))
        options = [rng.choice(family["colours"])]
        if family["sizes"] and rng.random() < 0.5:
            options.append(rng.choice(family["sizes"]))
        goal = goal_for(rng, family, attributes, options)
        held_out = {p["held_out"] for p in products if listed_as_fitting(p, goal)}
        if goal_key(goal) not in used_keys and held_out == {family["held_out"]}:
            return goal | {"instruction": instruction_of(rng, goal)}


def goal_for(rng: random.Random, item: dict, attributes: list[str], options: list[str]) -> dict:
    """Returns a goal without an instruction.

    Args:
        rng: The random number generator for the price limit.
        item: A product or a family that meets the goal.
        attributes: The requested attributes.
        options: The requested options, with the colour first.
    """
    # WebShop's price limit is the larger of two random picks among the first four multiples of 10
    # above the price.
    tens = [float(t) for t in range(10, 1000, 10) if t > item["price"]][:4]
    return {"name": item["Title"], "query": item["query"],
            "product_category": item["product_category"], "attributes": attributes,
            "goal_options": options, "price_upper": max(rng.sample(tens, 2))}


def instruction_of(rng: random.Random, goal: dict) -> str:
    """Returns an instruction for a goal, by a random template."""
    return rng.choice(TEMPLATES).format(
        type=goal["query"], attributes=" and ".join(goal["attributes"]),
        options=", ".join(goal["goal_options"]), limit=f"{goal['price_upper']:.2f}")


def split_page(observation: str) -> list[str]:
    """Returns the pieces of a page's text, in either view."""
    return re.split(r" \[SEP\] | \| ", observation)


def read_instruction(observation: str) -> dict:
    """Returns type, attributes, options (colour first) and price limit of the instruction on a
    page. Raises Stuck if there is no instruction by one of the TEMPLATES."""
    for pattern in _PATTERNS:
        match = pattern.search(observation)
        if match:
            return {"type": match["type"], "attributes": match["attributes"].split(" and "),
                    "options": match["options"].split(", "), "limit": float(match["limit"])}
    raise Stuck(f"no instruction in {observation[:80]!r}")


def read_results(observation: str) -> list[tuple[str, str, float]]:
    """Returns (asin, title, price) of each product on a results page."""
    pieces = split_page(observation)
    results = []
    for asin, title, price in zip(pieces, pieces[1:], pieces[2:]):
        if re.fullmatch("B0[A-Z0-9]{8}", asin) and re.fullmatch(r"\$\d+(\.\d+)?", price):
            results.append((asin, title, float(price[1:])))
    return results


def fitting(results, want):
    """Returns the results within the price limit whose titles have the most requested attributes,
    in the order of the page."""
    by_matches = defaultdict(list)
    for asin, title, price in results:
        if price <= want["limit"]:
            matches = sum(attribute in title.lower() for attribute in want["attributes"])
            by_matches[matches].append((asin, title, price))
    return by_matches[max(by_matches, default=0)]


def shop_expert(thoughts: bool):
    """Returns the scripted expert, a function observation -> reply that only reads the pages.

    It searches for the type and attributes, and opens the first result within the price limit that
    has the most attributes. If the colour is missing, it goes back and opens the next one. Finally
    it clicks the options and buys.

    Args:
        thoughts: True for replies in the form of ReAct, with a thought before each action.
    """
    script = _expert_script()
    next(script)

    def reply(observation: str) -> str:
        thought, action = script.send(observation)
        return f"Thought: {thought}\nAction: {action}" if thoughts else action
    return reply


def _expert_script():
    # This generator yields a thought and an action, and receives the next page by `send`.
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
            # To open another product, the expert clicks < Prev, then Next > if that product is on
            # the next page, then the product. It only does so if the clicks on the options and on
            # Buy Now still fit in the 10 turns of the episode.
            clicks = 2 if n + 1 < len(fits) else 3
            if colour in split_page(page) or steps + clicks + len(want["options"]) + 1 > 10:
                for option in want["options"]:
                    if option in split_page(page):
                        yield f"I want {option}.", f"click[{option}]"
                yield "The product is what I was asked for.", "click[Buy Now]"
            yield f"It does not come in {colour}, so I go back to the results.", "click[< Prev]"
            steps += 1
        page = yield "Nothing else here fits, so I look at the next page.", "click[Next >]"
        steps += 1
