"""Practice text of the built-in shop: noisy shoppers, who meet products under other numbers."""

import random
import string

from lab.pretrain.practice import Words, play
from worlds.webshop import catalogue
from worlds.webshop.shop import WebShop


def exchanged() -> list[Words]:
    """The numbers of products; colours and sizes are words that an instruction says."""
    rng = random.Random(0)
    numbers = tuple(product["asin"] for product in catalogue.shop_world().products)
    fresh = ("B0" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))
             for _ in range(48))
    return [Words(numbers, numbers, tuple(fresh), any=0.5)]


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


def conversations(seed: int, n: int) -> list[list[dict]]:
    """n conversations of shoppers of mixed competence, who often buy the wrong product. Their
    instructions are of no split. Held-out products are listed, but no shopper opens one."""
    shop = WebShop("short")
    world = shop.world
    rng = random.Random(f"shoppers-{seed}")
    taken = {catalogue.goal_key(goal) for goals in world.goals.values() for goal in goals}
    families = [family for family in world.families if not family["held_out"]]
    products = [product for product in world.products if not product["held_out"]]
    may_open = [product["asin"] for product in products]
    targets, texts = [], []
    for _ in range(n):
        habits, target = rng.choices(COMPETENCE, [c["share"] for c in COMPETENCE])[0], None
        if not habits["asked"]:
            targets = targets or rng.sample(products, len(products))
            target = targets.pop()
        family = rng.choice([f for f in families if not target or f["query"] == target["query"]])
        page = shop.start(catalogue.draw_goal(rng, family, taken, world.products))
        actions = _shopper_script(rng, page, habits, target, may_open)
        texts.append(play(shop, page, _with_slips(rng, shop, habits, actions)))
    return texts


def _with_slips(rng, shop, habits, actions):
    """The actions, with invalid ones before some of them, after which the page is the same."""
    action = next(actions)
    while True:
        while rng.random() < habits["slips"]:
            yield _slip(rng, shop)
        action = actions.send((yield action))


def _slip(rng, shop):
    """An action that this page does not take."""
    links = shop.page.links
    clicks = [rng.choice(catalogue.COLOUR_POOL), "Search", "Buy Now", "Next >", "< Prev"]
    slips = [f"click[{text}]" for text in clicks if text.lower() not in links]
    if links:  # every page but the search page
        slips.append(f"search[{rng.choice(list(catalogue.TYPES))}]")
    return rng.choice(slips)


def _shopper_script(rng, page, habits, target, may_open):
    want, opened = catalogue.read_instruction(page), set()
    while True:
        words = ([target["query"], *target["Attributes"]] if target else
                 [want["type"], *want["attributes"]])
        if not target and rng.random() > habits["asked"]:  # forgets a part or mixes it up
            mixed_up = rng.choice(["", *catalogue.TYPES[want["type"]][2]])
            words[rng.randrange(1, len(words))] = mixed_up  # it always knows the type
        page = yield f"search[{' '.join(dict.fromkeys(filter(None, words)))}]"
        results = []
        while True:
            if "(seen)" not in page:
                results = [r for r in catalogue.read_results(page) if r[0] in may_open]
            if results and not target and rng.random() < 0.1:
                page = yield "click[Next >]"
                continue
            fits = catalogue.fitting(results, want) if rng.random() < habits["fits"] else results
            fits = [asin for asin, _, _ in fits if asin not in opened]
            if not fits:
                yield "click[Back to Search]"
                break
            asin = target["asin"] if target else rng.choice(fits)
            target = None
            opened.add(asin)
            item = catalogue.split_page((yield f"click[{asin}]"))
            if rng.random() < habits["peeks"]:
                yield f"click[{rng.choice(['Description', 'Features', 'Reviews', 'Attributes'])}]"
                yield "click[< Prev]"
            if want["options"][0] not in item and rng.random() < habits["colour"]:
                page = yield "click[< Prev]"
                continue
            values = [*catalogue.COLOUR_POOL, *catalogue.TYPES[want["type"]][1]]
            shown = [value for value in item if value in values]
            for option in want["options"]:
                if option in shown and rng.random() < habits["right"]:
                    yield f"click[{option}]"
                elif rng.random() < 0.5:
                    yield f"click[{rng.choice(shown)}]"
            if rng.random() < habits["buys"]:
                yield "click[Buy Now]"
            yield "click[Back to Search]"
            break
