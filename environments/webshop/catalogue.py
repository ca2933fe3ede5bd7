"""Generates the products and goals of the built-in WebShop, and defines its scripted expert.

The products and goals are the same in every run. There are 12 product types with 8 families each.
Each family has its own pair of attributes. A family consists of four products with the same title,
called twins, so an agent has to read the pages to find the right product:

    a good product, which meets the goals of the family
    a product that costs 41 to 60 dollars more
    a product that is not available in the colours that goals request
    a product with both of these faults

The results page shows the price. Only the item page shows the colours.
"""

import random
import re
import string
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from envs import Stuck

DATA_SEED = 20251122  # random seed of the products and goals, independent of the run's seed [ours]

SIZES = {"worn": ["small", "medium", "large"], "beds": ["twin", "queen", "king"],
         "windows": ["short", "regular", "tall"], "-": []}
# {product type: (department, sizes, attributes)}. No word occurs in the names of two types.
# Otherwise, buying a product of the wrong type would earn partial reward.
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
_PATTERNS = [re.compile(template.format(
    type=r"(?P<type>\w+ \w+)", attributes="(?P<attributes>.+?)", options="(?P<options>.+?)",
    limit=r"(?P<limit>\d+(\.\d+)?)")) for template in TEMPLATES]
_TYPE_WORDS = set(" ".join(TYPES).split())


def type_words(name: str) -> list[str]:
    """Returns the words of a product's name that occur in the name of a product type.

    The reward compares these words. WebShop's official code compares nouns instead, and finds them
    with a part-of-speech tagger.
    """
    return [word for word in re.findall("[a-z]+", name.lower()) if word in _TYPE_WORDS]


@dataclass(frozen=True, eq=False)
class ShopData:
    """The products and goals of a built-in WebShop."""
    # A product has the fields that `webshop_reward` needs, the fields of its family, "options", and
    # its product number "asin".
    products: list[dict]
    # {split: goals}. A goal has the field "instruction" and the fields that `webshop_reward` needs.
    goals: dict[str, list[dict]]


@cache
def shop_data() -> ShopData:
    """Generates 384 products and 1,152 goals.

    One family of each type is held out. The goals of the held-out families are the split "unseen".
    No product of a held-out family meets a goal of another split.
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
    # The search ranks products with equal scores by index. We shuffle the products, so that the
    # index does not reveal which twin is the good product.
    rng.shuffle(products)
    for item in products:  # with DATA_SEED, all product numbers are different
        item["asin"] = "B0" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))

    # 2. Draw 12 random goals for each family.
    goals = {"unseen": []}
    by_request = defaultdict(list)  # {`goal_key`: goals}
    used_keys = set()  # (`goal_key`, price limit) of all goals
    for family in families:
        for _ in range(12):
            goal = draw_goal(rng, family, used_keys, products)
            group = goals["unseen"] if family["held_out"] else by_request[goal_key(goal)]
            group.append(goal)

    # 3. Distribute the other goals. Goals that differ only in the price limit share a split.
    groups = list(by_request.values())
    rng.shuffle(groups)
    for split, size in (("train", 600), ("validation", 158), ("test", 250)):
        chosen = []
        for group in [*groups]:
            if len(chosen) + len(group) <= size:
                chosen += group
                groups.remove(group)
        rng.shuffle(chosen)
        goals[split] = chosen
    return ShopData(products, goals)


def _family(rng, name, attributes, colours, held_out):
    # Goals of this family request only four of the type's eight colours, `own_colours`. Two of the
    # four twins have the other colours.
    own_colours = rng.sample(colours, 4)
    price = rng.choice([p for p in range(15, 70) if p % 10])
    title = " ".join([*attributes, name]).title()
    return {"name": title, "Title": title, "query": name, "Attributes": attributes, "price": price,
            "product_category": f"{TYPES[name][0]} › {name.title()}", "held_out": held_out,
            "sizes": TYPES[name][1], "colours": own_colours,
            "others": [c for c in colours if c not in own_colours]}


def _twins(rng, family):
    # The search uses only the title, description and bullet points, so it cannot tell twins apart.
    shared = family | dict(Description=f"A {family['query']} {rng.choice(PLACES)}.",
                           BulletPoints=rng.sample(BULLETS, 2))
    for expensive, colours in product((False, True), (family["colours"], family["others"])):
        price = family["price"]
        if colours is family["others"]:
            price += rng.randint(-4, 4)
        if expensive:  # a goal's price limit is at most 40 dollars above the good twin's price
            price = family["price"] + rng.randint(41, 60)
        options = {"color": rng.sample(colours, 4)}
        if family["sizes"]:
            options["size"] = family["sizes"]
        yield shared | {"options": options, "price": float(price)}


def listed_as_fitting(product: dict, goal: dict) -> bool:
    """Returns True if the type, attributes and price of a product meet a goal.

    Options are not compared, because the results page does not show them.
    """
    return (product["query"] == goal["query"] and product["price"] <= goal["price_upper"]
            and {*goal["attributes"]} <= {*product["Attributes"]})


def meets(product: dict, goal: dict) -> bool:
    """Returns True if the purchase of a product with the goal's options earns reward 1."""
    options = sum(product["options"].values(), [])
    return listed_as_fitting(product, goal) and {*goal["goal_options"]} <= {*options}


def goal_key(goal: dict) -> tuple:
    """Returns a key that contains all of a goal except its price limit and its wording."""
    return goal["query"], frozenset(goal["attributes"]), frozenset(goal["goal_options"])


def draw_goal(rng: random.Random, family: dict, used_keys: set, products: list[dict]) -> dict:
    """Draws a random goal that a product of a family meets.

    No earlier goal has the same key and the same price limit. If the family is held out, all
    products that `listed_as_fitting` accepts are held out, and otherwise none of them.

    Args:
        family: The fields that all products of the family share.
        used_keys: The pairs (`goal_key`, price limit) of all earlier goals. The function adds the
            pair of the new goal.
    """
    while True:
        attributes = rng.sample(family["Attributes"], rng.choice([1, 2]))
        options = [rng.choice(family["colours"])]
        if family["sizes"] and rng.random() < 0.5:
            options.append(rng.choice(family["sizes"]))
        goal = goal_for(family, attributes, options, draw_limit(rng, family["price"]))
        key = goal_key(goal), goal["price_upper"]
        held_out = {p["held_out"] for p in products if listed_as_fitting(p, goal)}
        if key not in used_keys and held_out == {family["held_out"]}:
            used_keys.add(key)
            return goal | {"instruction": instruction_of(rng, goal)}


def draw_limit(rng: random.Random, price: float) -> float:
    """Draws the price limit of a goal, as in WebShop.

    Two of the first four multiples of 10 above the price are drawn. The limit is the larger one.
    """
    tens = [float(t) for t in range(10, 1000, 10) if t > price][:4]
    return max(rng.sample(tens, 2))


def goal_for(item: dict, attributes: list[str], options: list[str], limit: float) -> dict:
    """Makes a goal without an instruction for a product or a family.

    Args:
        item: The product or family. It must have the requested attributes and options.
        options: The requested options, with the colour first.
    """
    return {"name": item["Title"], "query": item["query"],
            "product_category": item["product_category"], "attributes": attributes,
            "goal_options": options, "price_upper": limit}


def instruction_of(rng: random.Random, goal: dict) -> str:
    return rng.choice(TEMPLATES).format(
        type=goal["query"], attributes=" and ".join(goal["attributes"]),
        options=", ".join(goal["goal_options"]), limit=f"{goal['price_upper']:.2f}")


def split_page(observation: str) -> list[str]:
    """Splits the text of a page, in the full or the short view, into its pieces."""
    return re.split(r" \[SEP\] | \| ", observation)


def read_instruction(observation: str) -> dict:
    """Parses the instruction on a page, and raises Stuck if the page contains none.

    Returns a dict with "type", "attributes", "options" (the colour first) and "limit".
    """
    for pattern in _PATTERNS:
        match = pattern.search(observation)
        if match:
            return {"type": match["type"], "attributes": match["attributes"].split(" and "),
                    "options": match["options"].split(", "), "limit": float(match["limit"])}
    raise Stuck(f"no instruction in {observation[:80]!r}")


def read_results(observation: str) -> list[tuple[str, str, float]]:
    """Parses a results page. Returns (product number, title, price) for each product."""
    pieces = split_page(observation)
    results = []
    for asin, title, price in zip(pieces, pieces[1:], pieces[2:]):
        if re.fullmatch("B0[A-Z0-9]{8}", asin) and re.fullmatch(r"\$\d+(\.\d+)?", price):
            results.append((asin, title, float(price[1:])))
    return results


def fitting(results, want):
    """Selects the results that fit an instruction best, in the order of the page.

    These are the results within the price limit whose titles contain the most requested attributes.

    Args:
        results: A list of (product number, title, price), see `read_results`.
        want: The parsed instruction (see `read_instruction`).
    """
    by_matches = defaultdict(list)
    for asin, title, price in results:
        if price <= want["limit"]:
            matches = sum(attribute in title.lower() for attribute in want["attributes"])
            by_matches[matches].append((asin, title, price))
    return by_matches[max(by_matches, default=0)]


def shop_expert(thoughts: bool):
    """Returns the scripted expert, a function that takes an observation and returns a reply.

    The expert uses only the text of the pages. It searches for the type and the attributes, and
    opens the results that `fitting` selects until a product has the requested colour, or until too
    few turns are left. Then it clicks the options and buys the product.

    Args:
        thoughts: True for replies in ReAct format, with a thought before each action.
    """
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
            # To open a different product, the expert clicks on < Prev, on Next > if the product is
            # on the next results page, and on the product. If the 10 turns of the episode are not
            # enough for these clicks and a purchase, the expert buys the current product.
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
