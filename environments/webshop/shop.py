"""The built-in WebShop. An agent searches for a product that fits an instruction, and buys it.

The class `WebShop` defines the pages. Below it are the search engine, BM25, and WebShop's reward.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache

from environments import numbered, words_of
from environments.webshop import catalogue
from environments.webshop.pages import DONE, Page, Shop
from environments.webshop.tasks import TaskGenerator


@dataclass(frozen=True)
class Place:
    """The navigation state of an episode. It determines the page, like a URL of WebShop."""
    kind: str = "search"  # kind of the page, with the same values as `Page.kind`
    query: str = ""
    number: int = 1       # number of the results page, starting at 1
    item: int = -1        # index of the product, or -1 if no product is open
    options: tuple[tuple[str, str], ...] = ()  # chosen options as (name, value)
    sub: str = ""         # Description | Features | Reviews | Attributes


class WebShop(Shop):
    """The built-in WebShop, with a generated catalogue.

    It has the same pages, actions and reward as a WebShop server that was started with --attrs. The
    value of a task is a goal (see `catalogue.ShopData`).
    """
    test_splits = ("test", "unseen")
    max_results = 50
    page_size = 4  # results per page (10 in WebShop)

    def __init__(self, view: str = "full", data: catalogue.ShopData | None = None):
        super().__init__(view)
        self.data = data or catalogue.shop_data()
        self.splits = {split: numbered(goals) for split, goals in self.data.goals.items()}
        self.search = search_engine(self.data)

    def start(self, goal: dict) -> str:
        self.goal = goal
        return self.show(self.follow(Place()), first=True)

    def task_generator(self):
        return TaskGenerator(self)

    def expert(self):
        return catalogue.shop_expert(thoughts=self.view == "full")

    def follow(self, place: Place | None, query: str = "") -> Page:
        if place is None:
            place = Place("results", query=query)
        if place.kind == "done":
            product = self.data.products[place.item]
            reward = webshop_reward(product, self.goal, dict(place.options), product["price"],
                                    catalogue.type_words)
            return Page("done", DONE, {}, place.item, reward, place.options)

        pieces = ["Instruction:", self.goal["instruction"]]
        if place.kind == "search":
            return Page("search", ["WebShop", *pieces, "Search"], {})
        pieces.append("Back to Search")
        links = {"back to search": Place()}
        if place.kind == "results":
            add_results(self, place, pieces, links)
        elif place.kind == "item":
            add_item(self.data.products[place.item], place, pieces, links)
        else:
            pieces += ["< Prev", *sub_pages(self.data.products[place.item])[place.sub]]
            links["< prev"] = replace(place, kind="item", sub="")  # chosen options do not change
        return Page(place.kind, pieces, links, place.item, options=place.options)


def add_results(shop: WebShop, place: Place, pieces: list[str],
                links: dict[str, Place]) -> None:
    hits = shop.search(place.query)[:shop.max_results]
    pieces.append(f"Page {place.number} (Total results: {len(hits)})")
    if place.number > 1:
        pieces.append("< Prev")
        links["< prev"] = replace(place, number=place.number - 1)
    # The last results page also has a button "Next >", which leads to an empty results page.
    pieces.append("Next >")
    links["next >"] = replace(place, number=place.number + 1)

    first = (place.number - 1) * shop.page_size
    for item in hits[first:first + shop.page_size]:
        product = shop.data.products[item]
        pieces += [product["asin"], product["Title"], f"${product['price']}"]
        links[product["asin"].lower()] = replace(place, kind="item", item=item)


def add_item(product: dict, place: Place, pieces: list[str], links: dict[str, Place]) -> None:
    pieces.append("< Prev")
    # As in WebShop, a click on "< Prev" discards the chosen options.
    links["< prev"] = replace(place, kind="results", item=-1, options=())
    for sub in sub_pages(product):
        links[sub.lower()] = replace(place, kind="sub-page", sub=sub)
    links["buy now"] = replace(place, kind="done")

    # If two options share a value, a click on this value sets the last option, as in WebShop.
    for name, values in product["options"].items():
        pieces += [name, *values]
        for value in values:
            options = dict(place.options) | {name: value}
            links[value] = replace(place, options=tuple(options.items()))
    pieces += [product["Title"], f"Price: ${product['price']}", "Rating: N.A."]
    pieces += [*sub_pages(product), "Buy Now"]


def sub_pages(product: dict) -> dict[str, list[str]]:
    """Returns the sub-pages of a product, a dict {name: texts of the page}."""
    category = product["product_category"]
    department = category.partition(" › ")[0]
    return {
        "Description": [product["Description"]],
        "Features": product["BulletPoints"],
        "Reviews": [],
        "Attributes": [*product["Attributes"], department, product["query"], category],
    }


@lru_cache(maxsize=4)
def search_engine(data: catalogue.ShopData):
    """Returns the search engine, a function that takes a query and returns the indices of products.

    The options are not searched, so a query for a colour does not find the products in this colour.
    """
    texts = []
    for product in data.products:
        bullet = product["BulletPoints"][:1]
        texts.append(" ".join([product["Title"], product["Description"], *bullet]))
    return lru_cache(maxsize=4096)(BM25(texts))


class BM25:
    """BM25 ranking in the form of Lucene, the search engine of WebShop's server.

        score(query, text) = sum over the words of the query:  idf * n / (n + k1 * (1 - b + b * l))
        idf = log(1 + (N - f + 0.5) / (f + 0.5))

    n is the number of times that the word occurs in the text. l is the length of the text divided
    by the mean length of all texts. N is the number of texts, and f is the number of texts that
    contain the word. The constants k1 and b have the same values as in WebShop.
    """
    k1 = 0.9
    b = 0.4

    def __init__(self, texts: list[str]):
        counts = [Counter(words_of(text).split()) for text in texts]
        mean = sum(count.total() for count in counts) / len(counts)
        texts_with = Counter()
        for count in counts:
            texts_with.update(count.keys())

        self.scores = defaultdict(list)  # {word: [(index of a text, score of the text), ...]}
        for index, count in enumerate(counts):
            norm = 1 - self.b + self.b * count.total() / mean
            for word, n in count.items():
                f = texts_with[word]
                idf = math.log(1 + (len(texts) - f + 0.5) / (f + 0.5))
                score = idf * (n / (n + self.k1 * norm))
                self.scores[word].append((index, score))

    def __call__(self, query: str) -> list[int]:
        """Returns the indices of all texts that contain a word of the query, with the highest score
        first. Texts with equal scores are sorted by index."""
        total = Counter()
        for word in words_of(query).split():
            for index, score in self.scores.get(word, ()):
                total[index] += score
        return sorted(total, key=lambda index: (-total[index], index))


# ------------------------------------------------------------------------------ WebShop's reward

# WebShop's colour list has 102 colours. This list contains the 16 basic colours in alphabetical
# order.
COLOURS = ("beige black blue brown gold gray green grey navy orange pink purple red silver "
           "white yellow").split()


def webshop_reward(product: dict, goal: dict, options: dict, price: float,
                   nouns=None) -> float:
    """Returns WebShop's reward for a purchase, in [0, 1].

        r_type * (n_att + n_opt + r_price) / (|A| + |O| + 1)

    n_att is the number of requested attributes A that the product has. n_opt is the number of
    requested options O that the agent has chosen. r_price is 1 if the price is within the limit,
    and otherwise 0. r_type is 1 if the type of the product fits, and otherwise smaller (see
    `type_reward`).

    Args:
        product: A dict with name, Title, query, product_category, Attributes, BulletPoints and
            Description.
        goal: A dict with name, query, product_category, attributes (A), goal_options (O, a list or
            a dict) and price_upper (the limit).
        options: The chosen options, a dict {name: value}.
        price: The price of the product with the chosen options.
        nouns: A function that returns the words of a name that determine the type. The default
            returns all alphabetic words. The official code finds nouns with spaCy.
    """
    attributes = goal["attributes"]
    n_att = sum(has_attribute(product, attribute) for attribute in attributes)

    wanted = goal["goal_options"]
    if isinstance(wanted, dict):  # the official code converts each (name, value) to a string
        wanted = wanted.items()
    wanted = [str(normalise_colour(option)) for option in wanted]
    chosen = [normalise_colour(option) for option in options.values()]
    n_opt = sum(is_among(option, chosen) for option in wanted)

    r_price = price <= goal["price_upper"]
    r_type = type_reward(product, goal, nouns or alphabetic_words)
    return r_type * ((n_att + n_opt + r_price) / (len(attributes) + len(wanted) + 1))


def type_reward(product: dict, goal: dict, nouns) -> float:
    """Returns r_type, a factor of WebShop's reward, in [0, 1]."""
    wanted = nouns(goal["name"])
    shared = {*wanted} & {*nouns(product["name"])}
    title_score = len(shared) / len(wanted) if wanted else 0.2
    if title_score == 0:  # without a common noun, the reward is 0 even for identical queries
        return 0.0
    if title_score < 0.1:
        return 0.1
    same_query = product["query"] == goal["query"]
    same_category = len(categories(product) & categories(goal)) >= 2
    return 1.0 if same_query or same_category or title_score > 0.2 else 0.5


def categories(item: dict) -> set[str]:
    """Returns the parts of a product category such as "Home › Kitchen › Kettles"."""
    return {part.strip() for part in item["product_category"].split("›")}


def alphabetic_words(name: str) -> list[str]:
    """Returns the words of a name that consist of letters only, in lower case."""
    return [word.lower() for word in re.findall(r"\w+", name) if word.isalpha()]


def has_attribute(product: dict, attribute: str) -> bool:
    texts = [product["Title"], " ".join(product["BulletPoints"]), product["Description"]]
    return attribute in "\n".join(texts).lower() or is_among(attribute, product["Attributes"])


def is_among(wanted: str, texts: list[str]) -> bool:
    return any(token_set_ratio(text, wanted) > 85 for text in texts)


def normalise_colour(option):
    """Simplifies the name of a colour: "rose gold" becomes "gold". Other options do not change."""
    for colour in COLOURS:
        if colour in option:
            return colour
    return option


@lru_cache(maxsize=65536)
def token_set_ratio(a: str, b: str) -> int:
    """Returns the similarity of two texts, from 0 to 100. The order of the words has no effect.

    The function gives the same results as token_set_ratio in thefuzz 0.19, the version that WebShop
    uses. The distinct words of each text are sorted, with the words that both texts share first.
    The result is the largest of three difflib ratios: between the two texts, and between the shared
    words and each text.
    """
    words_a = plain_words(a)
    words_b = plain_words(b)
    if not words_a or not words_b:
        return 0
    shared = " ".join(sorted(words_a & words_b))
    rest_a = " ".join(sorted(words_a - words_b))
    rest_b = " ".join(sorted(words_b - words_a))
    full_a = f"{shared} {rest_a}".strip()
    full_b = f"{shared} {rest_b}".strip()

    best = 0
    for x, y in ((shared, full_a), (shared, full_b), (full_a, full_b)):
        if x:
            ratio = SequenceMatcher(None, x, y).ratio()
            best = max(best, round(100 * ratio))
    return best


def plain_words(text: str) -> set[str]:
    """Returns the set of words in a text, in lower case, without characters 128 to 255 as in
    thefuzz."""
    text = re.sub("[\x80-\xff]", "", text)
    return {*re.sub(r"\W", " ", text).lower().split()}
