"""WebShop, the embedded shop: an agent searches, opens pages, and buys what it was asked for.

From top to bottom: what a page is, the rules that the embedded shop and a real server share, the
embedded shop and its pages, its search, and WebShop's reward.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from importlib import import_module

from environments import words_of
from environments.webshop import catalogue
from envs import Environment, Step

PROMPT = """\
You are shopping on a web shop. Find and buy a product that fits the instruction: its kind, its \
attributes, its options and its price.

Each turn you read the current page. Its parts are separated by [SEP]. Answer with a thought and \
one action:
Thought: why you do it
Action: the action

There are two actions:
search[words] - look for products; only on the search page
click[text] - press a button, open a product by its number, or choose an option; the text must \
be on the page

Choose the wanted options before click[Buy Now], which ends the episode. You have 10 turns. \
An action that the page does not offer does nothing and uses up a turn."""

DONE = ["Thank you for shopping with us!", "Your code:"]


@dataclass(frozen=True)
class Page:
    """A page, whichever shop it is from."""
    kind: str            # search | results | item | sub-page | done
    pieces: list[str]    # visible text
    links: dict          # lowercased text -> what lies behind a click on it
    item: object = None  # the product of an item page, sub-page or purchase
    reward: float = 0.0  # of the purchase, on the page "done"
    options: tuple = ()  # chosen (name, value), where the shop is the embedded one


class Shop(Environment):
    """What the embedded shop and a real server share. Text and rules are the official text
    environment's, but a search is valid on the search page only, and the page after a purchase ends
    at "Your code:", because the rest shows the goal and the reward.

    view="short", for a very small model: pages after the first come without the instruction and
    "Back to Search" (it can still be clicked), and one that was shown before in the episode is its
    first piece and "(seen)".

    A subclass has follow(link, query) -> the `Page` behind a link, or that of a search's results
    where the link is None.
    """
    name = "webshop"
    rules = PROMPT
    max_turns = 10
    searches_everywhere = False  # as by ETO's protocol

    def __init__(self, view: str = "full"):
        super().__init__(view)
        self.page = None           # the one that the agent sees
        self.shown_before = set()  # what the short view has shown in this episode

    def step(self, reply: str) -> Step:
        """Searches or clicks; an action that the page does not offer leaves it as it is."""
        name, argument = name_and_argument(self.action(reply))
        page = self.page
        if name == "search" and (page.kind == "search" or self.searches_everywhere):
            page = self.follow(None, argument)
        elif name == "click" and argument in page.links:
            page = self.follow(page.links[argument])
        idle = page == self.page
        return Step(show(self, page), page.reward, page.kind == "done", idle=idle)

    def possible(self) -> tuple[list[str], str]:
        clicks = [f"click[{text}]" for text in self.page.links]
        forms = "search[words]" if self.page.kind == "search" else ""
        return clicks, forms


def name_and_argument(action: str) -> tuple[str, str]:
    """Returns ("search", "red mug") for search[Red mug], whatever follows it; else no name.

    As in WebShop's pattern `(.+)[(.+)]`, the argument ends at the last "]" of the line and begins
    at the last "[" that leaves it a character. The pattern itself takes quadratic time.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1:end].lower()) if start > 0 else ("", "")


def show(shop: Shop, page: Page, first: bool = False) -> str:
    """The page as the agent reads it, from now on the one that it acts on. first: of an episode."""
    shop.page = page
    if first:
        shop.shown_before = set()
    if shop.view == "full":
        return " [SEP] ".join(page.pieces)

    # Title and text of the instruction and "Back to Search" are the first three pieces.
    pieces = page.pieces
    if page.kind not in ("search", "done"):
        pieces = pieces[3:]
    text = " | ".join(pieces)
    key = page.kind, page.item, text
    if key in shop.shown_before:
        return f"{pieces[0]} (seen)"
    shop.shown_before.add(key)
    return text


@dataclass(frozen=True)
class Place:
    """Where the shopper is. As in WebShop's URLs, it carries all navigation state."""
    kind: str = "search"  # as a page's
    query: str = ""
    number: int = 1       # page of the results, from 1
    item: int = -1        # product number
    options: tuple[tuple[str, str], ...] = ()  # chosen (name, value)
    sub: str = ""         # Description | Features | Reviews | Attributes


class WebShop(Shop):
    """WebShop's pages (of a server started with --attrs), actions and reward over a generated
    catalogue. A task is a goal: what `webshop_reward` takes, with its instruction."""
    test_splits = ("test", "unseen")
    max_results = 50
    page_size = 4  # results; WebShop itself shows 10

    def __init__(self, view: str = "full", data: catalogue.ShopData | None = None):
        super().__init__(view)
        self.data = data or catalogue.shop_data()
        self.splits = {}
        for split, goals in self.data.goals.items():
            self.splits[split] = {str(n): goal for n, goal in enumerate(goals)}
        self.search = search_engine(self.data)

    def start(self, goal: dict) -> str:
        self.goal = goal
        return show(self, self.follow(Place()), first=True)

    def task_generator(self):
        return import_module("environments.webshop.tasks").TaskGenerator(self)

    def expert(self):
        return catalogue.shop_expert(thoughts=self.view == "full")

    def follow(self, place: Place | None, query: str = "") -> Page:
        if place is None:
            place = Place("results", query=query)
        if place.kind == "done":
            product = self.data.products[place.item]
            options = dict(place.options)
            reward = webshop_reward(product, self.goal, options, product["price"],
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
            links["< prev"] = replace(place, kind="item", sub="")  # chosen options are kept
        return Page(place.kind, pieces, links, place.item, options=place.options)


def add_results(shop: WebShop, place: Place, pieces: list[str],
                links: dict[str, Place]) -> None:
    """Adds to a page's text and links what a page of results has."""
    hits = shop.search(place.query)[:shop.max_results]
    pieces.append(f"Page {place.number} (Total results: {len(hits)})")
    if place.number > 1:
        pieces.append("< Prev")
        links["< prev"] = replace(place, number=place.number - 1)
    pieces.append("Next >")  # always there; past the end the list is empty
    links["next >"] = replace(place, number=place.number + 1)

    first = (place.number - 1) * shop.page_size
    for item in hits[first:first + shop.page_size]:
        product = shop.data.products[item]
        asin = product["asin"]
        price = float(product["price"])
        pieces += [asin, product["Title"], f"${price}"]
        links[asin.lower()] = replace(place, kind="item", item=item)


def add_item(product: dict, place: Place, pieces: list[str], links: dict[str, Place]) -> None:
    """Adds to a page's text and links what a product's page has."""
    pieces.append("< Prev")
    links["< prev"] = replace(place, kind="results", item=-1, options=())  # options are lost
    for sub in sub_pages(product):
        links[sub.lower()] = replace(place, kind="sub-page", sub=sub)
    links["buy now"] = replace(place, kind="done")

    # Of two options that share a value the last one's is chosen, as in WebShop.
    for name, values in product["options"].items():
        pieces += [name, *values]
        for value in values:
            chosen = dict(place.options) | {name: value}
            links[value] = replace(place, options=tuple(chosen.items()))
    price = float(product["price"])
    pieces += [product["Title"], f"Price: ${price}", "Rating: N.A."]
    pieces += [*sub_pages(product), "Buy Now"]


def sub_pages(product: dict) -> dict[str, list[str]]:
    """Name -> text of the pages that tell more about a product."""
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
    """query -> product numbers, over title, description and first bullet; not over options, so
    colours stay hidden."""
    texts = []
    for product in data.products:
        bullet = product["BulletPoints"][:1]
        texts.append(" ".join([product["Title"], product["Description"], *bullet]))
    return lru_cache(maxsize=4096)(BM25(texts))


class BM25:
    """Ranking of Lucene's kind over short texts.

        score(query, text) = sum over the query's words of  idf * n / (n + k1 * (1 - b + b * l))

    where a text has the word n times and is l times as long as the mean; k1 and b as WebShop sets
    them. Rare words weigh more: idf = log(1 + (N - f + 0.5) / (f + 0.5)) for f texts of N.
    """
    k1 = 0.9
    b = 0.4

    def __init__(self, texts: list[str]):
        counts = [Counter(words_of(text).split()) for text in texts]
        mean = sum(count.total() for count in counts) / len(counts)
        texts_with = Counter()
        for count in counts:
            texts_with.update(count.keys())

        self.scores = defaultdict(list)  # word -> [(text, its score for the word)]
        for number, count in enumerate(counts):
            norm = 1 - self.b + self.b * count.total() / mean
            for word, n in count.items():
                f = texts_with[word]
                idf = math.log(1 + (len(texts) - f + 0.5) / (f + 0.5))
                score = idf * (n / (n + self.k1 * norm))
                self.scores[word].append((number, score))

    def __call__(self, query: str) -> list[int]:
        """Texts that share a word with the query, best first; ties in the order of the texts."""
        total = Counter()
        for word in words_of(query).split():
            for number, score in self.scores.get(word, ()):
                total[number] += score
        return sorted(total, key=lambda number: (-total[number], number))


# ------------------------------------------------------------------------------ WebShop's reward

# The sixteen plain words of WebShop's colour list, in its (alphabetical) order.
COLOURS = ("beige black blue brown gold gray green grey navy orange pink purple red silver "
           "white yellow").split()


def webshop_reward(product: dict, goal: dict, options: dict, price: float,
                   nouns=None) -> float:
    """WebShop's reward for a purchase.

        r_type * (n_att + n_opt + r_price) / (|A| + |O| + 1)

    Args:
        product: name, Title, query, product_category, Attributes, BulletPoints, Description.
        goal: name, query, product_category, attributes (A), goal_options (O; list or dict),
            price_upper.
        options: the chosen ones, name -> value.
        price: the product's with these options.
        nouns: name -> the words that decide its type, alphabetic words by default; the official
            code asks a tagger.

    Returns:
        The reward, in [0, 1].
    """
    attributes = goal["attributes"]
    n_att = sum(has_attribute(product, attribute) for attribute in attributes)

    wanted = goal["goal_options"]
    if isinstance(wanted, dict):  # the official code compares whole (name, value) pairs
        wanted = wanted.items()
    wanted = [str(normalise_colour(option)) for option in wanted]
    chosen = [normalise_colour(option) for option in options.values()]
    n_opt = sum(is_among(option, chosen) for option in wanted)

    r_price = price <= goal["price_upper"]
    r_type = type_reward(product, goal, nouns or alphabetic_words)
    return r_type * ((n_att + n_opt + r_price) / (len(attributes) + len(wanted) + 1))


def type_reward(product: dict, goal: dict, nouns) -> float:
    """How well the kind of the product fits the goal, in [0, 1]: r_type."""
    wanted = nouns(goal["name"])
    shared = {*wanted} & {*nouns(product["name"])}
    title_score = len(shared) / len(wanted) if wanted else 0.2
    if title_score == 0:  # no shared noun is worth nothing, even with the same query
        return 0.0
    if title_score < 0.1:
        return 0.1
    same_query = product["query"] == goal["query"]
    same_category = len(categories(product) & categories(goal)) >= 2
    return 1.0 if same_query or same_category or title_score > 0.2 else 0.5


def categories(item: dict) -> set[str]:
    """The parts of a product category, as in "Home › Kitchen › Kettles"."""
    return {part.strip() for part in item["product_category"].split("›")}


def alphabetic_words(name: str) -> list[str]:
    """The words of a name that have letters only, in lower case."""
    return [word.lower() for word in re.findall(r"\w+", name) if word.isalpha()]


def has_attribute(product: dict, attribute: str) -> bool:
    """Whether the product lists a similar attribute, or says it in one of its texts."""
    bullets = " ".join(product["BulletPoints"])
    for text in (product["Title"], bullets, product["Description"]):
        if attribute in text.lower():
            return True
    return is_among(attribute, product["Attributes"])


def is_among(wanted: str, texts: list[str]) -> bool:
    """Whether one of the texts is similar."""
    return any(token_set_ratio(text, wanted) > 85 for text in texts)


def normalise_colour(option):
    """The first colour word inside an option value ("rose gold" is gold), else the value."""
    for colour in COLOURS:
        if colour in option:
            return colour
    return option


@lru_cache(maxsize=65536)
def token_set_ratio(a: str, b: str) -> int:
    """Similarity of two texts as sets of words, 0-100, as in thefuzz 0.19 (difflib's ratio): the
    largest of those between what they share and each of them, and between them."""
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
    """A text's words: characters 128-255 are dropped, other non-word characters part them."""
    text = re.sub("[\x80-\xff]", "", text)
    return {*re.sub(r"\W", " ", text).lower().split()}
