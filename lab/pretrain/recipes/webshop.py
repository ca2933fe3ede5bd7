"""Practice text of the built-in shop: noisy shoppers, who meet products under other numbers."""

import random
import re

from environments.webshop import catalogue
from environments.webshop.shop import WebShop
from lab.pretrain.practice import Words, play

MISHEARD = 0.4  # of shoppers, who buy what somebody else asks for


def exchanged() -> list[Words]:
    """The numbers of products; colours and sizes are words that an instruction says."""
    numbers = tuple(product["asin"] for product in catalogue.shop_data().products)
    return [Words(numbers, numbers)]


def conversations(seed: int, n: int) -> list[list[dict]]:
    """n conversations of shoppers, who often buy the wrong product. Their instructions are of no
    split. Held-out products are listed, but no shopper opens one."""
    shop = WebShop("short")
    data = shop.data
    rng = random.Random(f"shoppers-{seed}")
    taken = {catalogue.goal_key(goal) for goals in data.goals.values() for goal in goals}
    families = [family for family in data.families if not family["held_out"]]
    held_out = {product["asin"] for product in data.products if product["held_out"]}

    def slips(page):
        """Looks at a part of a product's page, or does what perhaps no page takes."""
        if shop.page.kind == "item" and rng.random() < 0.5:
            part = rng.choice(["Description", "Features", "Reviews", "Attributes"])
            return [f"click[{part}]", "click[< Prev]"]
        if shop.page.kind == "results" and rng.random() < 0.3:
            return [f"search[{rng.choice(list(catalogue.TYPES))}]"]
        return [f"click[{rng.choice([*catalogue.COLOUR_POOL, 'Search', 'Buy Now'])}]"]

    texts = []
    for _ in range(n):
        family = rng.choice(families)
        goal = catalogue.draw_goal(rng, family, taken, data.products)
        other = catalogue.draw_goal(rng, family, taken, data.products)
        page = shop.start(goal)
        wanted = other if rng.random() < MISHEARD else goal
        expert = shop.expert()

        def means(observation):
            for asin in re.findall("B0[A-Z0-9]{8}", observation):
                if asin in held_out:
                    observation = observation.replace(asin, "")
            return expert(observation.replace(goal["instruction"], wanted["instruction"]))

        texts.append(play(shop, page, means, slips, rng))
    return texts
