"""WebShop, the embedded shop: an agent searches, opens pages, and buys what it was asked for."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache

from worlds import Step, World, said, words_of
from worlds.webshop import catalogue

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
class Shown:
    """What a page shows, whichever shop it is from."""
    kind: str            # search | results | item | sub-page | done
    pieces: list[str]    # visible text
    links: dict          # lowercased text -> what lies behind a click on it
    item: object = None  # the product of an item page, sub-page or purchase
    reward: float = 0.0  # of the purchase, on the page "done"
    options: tuple = ()  # chosen (name, value), where the shop is the embedded one


class Shop(World):
    """What the embedded shop and a real server share. Text and rules are the official text
    environment's, but a search is valid on the search page only (not by ETO's protocol), and the
    page after a purchase ends at "Your code:", because the rest shows the goal and the reward.

    view="short", for a very small model: pages after the first come without the instruction and
    "Back to Search" (it can still be clicked), and one that was shown before in the episode is its
    first piece and "(seen)".
    """
    name = "webshop"
    rules = PROMPT
    max_steps = 10
    shown = None  # the page that the agent sees, a `Shown`; None: none yet

    def step(self, reply: str) -> Step:
        shown, action = self.shown, self.action(reply)
        if action is None:
            return Step(self.theirs.no_action, 0.0, False)
        match = re.match(r"(.+)\[(.+)\]", action)
        name, argument = (match[1], match[2].lower()) if match else ("", "")
        if name == "search" and (shown.kind == "search" or self.theirs):  # ETO's: on every page
            shown = self._follow(None, argument)
        elif name == "click" and argument in shown.links:
            shown = self._follow(shown.links[argument])
        return Step(said(self, self._show(shown)), shown.reward, shown.kind == "done")

    def possible(self) -> tuple[list[str], str]:
        return ([f"click[{text}]" for text in self.shown.links],
                "search[words]" if self.shown.kind == "search" else "")

    def _show(self, shown: Shown) -> str:
        self.shown = shown
        if self.view == "full":
            return " [SEP] ".join(shown.pieces)
        pieces = shown.pieces if shown.kind in ("search", "done") else shown.pieces[3:]
        text = " | ".join(pieces)
        if (shown.kind, shown.item, text) in self._seen:
            return f"{pieces[0]} (seen)"
        self._seen.add((shown.kind, shown.item, text))
        return text


@dataclass(frozen=True)
class Page:
    """Where the shopper is. As in WebShop's URLs, a page carries all navigation state."""
    kind: str = "search"  # search | results | item | sub-page | done
    query: str = ""
    number: int = 1       # page of the results, from 1
    item: int = -1        # product number
    options: tuple[tuple[str, str], ...] = ()  # chosen (name, value)
    sub: str = ""         # Description | Features | Reviews | Attributes


class WebShop(Shop):
    """WebShop's pages (of a server started with --attrs), actions and reward over a generated
    catalogue. A task is a goal: what `webshop_reward` takes, with its instruction."""
    test_splits = ("test", "unseen")
    makes_tasks = True
    max_results = 50
    page_size = 4  # results; WebShop itself shows 10

    def __init__(self, view: str = "full", world: catalogue.ShopWorld | None = None):
        super().__init__(view)
        self.world = world or catalogue.shop_world()
        self.splits = {split: {str(n): goal for n, goal in enumerate(goals)}
                       for split, goals in self.world.goals.items()}
        self.search = _search_engine(self.world)

    def start(self, goal: dict) -> str:
        self.goal, self._seen = goal, set()
        return self._show(self._follow(Page()))

    def expert(self):
        return catalogue.shop_expert(thoughts=self.view == "full")

    def _follow(self, page: Page | None, query: str = "") -> Shown:
        page = page or Page("results", query=query)
        product = self.world.products[page.item]
        reward = webshop_reward(product, self.goal, dict(page.options), product["price"],
                                catalogue.type_words) if page.kind == "done" else 0.0
        return Shown(page.kind, *render(self, page), page.item, reward, page.options)


def render(shop: WebShop, page: Page) -> tuple[list[str], dict[str, Page]]:
    """The page's visible pieces of text, and the page behind each clickable."""
    if page.kind == "done":
        return DONE, {}
    pieces = ["Instruction:", shop.goal["instruction"]]
    if page.kind == "search":
        return ["WebShop", *pieces, "Search"], {}
    pieces, links = [*pieces, "Back to Search"], {"back to search": Page()}
    if page.kind == "results":
        hits = shop.search(page.query)[:shop.max_results]
        pieces.append(f"Page {page.number} (Total results: {len(hits)})")
        if page.number > 1:
            pieces.append("< Prev")
            links["< prev"] = replace(page, number=page.number - 1)
        pieces.append("Next >")  # always there; past the end the list is empty
        links["next >"] = replace(page, number=page.number + 1)
        first = (page.number - 1) * shop.page_size
        for i in hits[first:first + shop.page_size]:
            product = shop.world.products[i]
            pieces += [product["asin"], product["Title"], f"${float(product['price'])}"]
            links[product["asin"].lower()] = replace(page, kind="item", item=i)
        return pieces, links

    product, pieces = shop.world.products[page.item], [*pieces, "< Prev"]
    subs = {"Description": [product["Description"]], "Features": product["BulletPoints"],
            "Reviews": [], "Attributes": [*product["Attributes"], *kinds_of(product)]}
    if page.kind == "sub-page":
        links["< prev"] = replace(page, kind="item", sub="")  # chosen options are kept
        return pieces + subs[page.sub], links
    links["< prev"] = replace(page, kind="results", item=-1, options=())  # options are lost
    links |= {sub.lower(): replace(page, kind="sub-page", sub=sub) for sub in subs}
    links["buy now"] = replace(page, kind="done")
    for name, values in product["options"].items():
        pieces += [name, *values]
        links |= {value: replace(page, options=tuple((dict(page.options) | {
            name: value}).items())) for value in values}
    pieces += [product["Title"], f"Price: ${float(product['price'])}", "Rating: N.A.",
               *subs, "Buy Now"]
    return pieces, links


def kinds_of(product: dict) -> list[str]:
    """Category, query and product category, which the page of attributes shows behind them."""
    department = product["product_category"].partition(" › ")[0]
    return [product.get("category", department), product["query"], product["product_category"]]


@lru_cache(maxsize=4)
def _search_engine(world):
    """Search over title, description and first bullet; not over options, so colours stay hidden."""
    return lru_cache(maxsize=4096)(BM25([
        " ".join([p["Title"], p["Description"], *p["BulletPoints"][:1]]) for p in world.products]))


class BM25:
    """Ranking of Lucene's kind over short texts: k1 0.9, b 0.4 as WebShop sets them."""

    def __init__(self, texts: list[str]):
        counts = [Counter(words_of(text).split()) for text in texts]
        mean = sum(count.total() for count in counts) / len(counts)
        found = Counter(word for count in counts for word in count)
        self._weights = defaultdict(list)  # word -> [(document, its score for the word)]
        for i, count in enumerate(counts):
            for word, n in count.items():
                idf = math.log(1 + (len(texts) - found[word] + 0.5) / (found[word] + 0.5))
                tf = n / (n + 0.9 * (1 - 0.4 + 0.4 * count.total() / mean))
                self._weights[word].append((i, idf * tf))

    def __call__(self, query: str) -> list[int]:
        """Documents that share a word with the query, best first; ties in document order."""
        scores = Counter()
        for word in words_of(query).split():
            for i, weight in self._weights.get(word, ()):
                scores[i] += weight
        return sorted(scores, key=lambda i: (-scores[i], i))


# The sixteen plain words of WebShop's colour list, in its (alphabetical) order.
COLOURS = ("beige black blue brown gold gray green grey navy orange pink purple red silver "
           "white yellow").split()


@lru_cache(maxsize=65536)
def token_set_ratio(a: str, b: str) -> int:
    """Similarity of two strings as word sets, 0-100, as in thefuzz 0.19 (difflib's ratio)."""
    def words(text):  # characters 128-255 are dropped, other non-word characters split
        return set(re.sub(r"\W", " ", re.sub("[\x80-\xff]", "", text)).lower().split())

    words_a, words_b = words(a), words(b)
    if not words_a or not words_b:
        return 0
    shared = " ".join(sorted(words_a & words_b))
    full_a = f"{shared} {' '.join(sorted(words_a - words_b))}".strip()
    full_b = f"{shared} {' '.join(sorted(words_b - words_a))}".strip()
    pairs = [(shared, full_a), (shared, full_b), (full_a, full_b)]
    return max(round(100 * SequenceMatcher(None, x, y).ratio()) if x else 0 for x, y in pairs)


def normalise_colour(option: str) -> str:
    """The first colour word inside an option value ("rose gold" is gold), else the value."""
    return next((colour for colour in COLOURS if colour in option), option)


def alphabetic_words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"\w+", name) if word.isalpha()]


def webshop_reward(product: dict, goal: dict, options: dict, price: float,
                   nouns=alphabetic_words) -> float:
    """WebShop's reward in [0, 1] for buying `product` with the chosen `options` at `price`.

    `product`: name, Title, query, product_category, Attributes, BulletPoints, Description.
    `goal`: name, query, product_category, attributes, goal_options (list or dict), price_upper.
    `nouns(name)`: the words that decide a name's type; the official code asks a tagger.

        r_type * (n_att + n_opt + r_price) / (|A| + |O| + 1)
    """
    def parts(item):
        return {part.strip() for part in item["product_category"].split("›")}

    wanted, found = nouns(goal["name"]), nouns(product["name"])
    title_score = len(set(wanted) & set(found)) / len(wanted) if wanted else 0.2
    same_query = product["query"] == goal["query"]
    same_category = len(parts(product) & parts(goal)) >= 2
    r_type = 1.0 if same_query or same_category or title_score > 0.2 else 0.5
    if title_score < 0.1:  # no shared noun is worth nothing, even with the same query
        r_type = 0.1 if title_score else 0.0

    texts = [product["Title"].lower(), " ".join(product["BulletPoints"]).lower(),
             product["Description"].lower()]
    n_att = sum(any(token_set_ratio(have, want) > 85 for have in product["Attributes"])
                or any(want in text for text in texts) for want in goal["attributes"])

    goal_options = goal["goal_options"]
    if isinstance(goal_options, dict):  # the official code compares whole (name, value) pairs
        goal_options = goal_options.items()
    wanted = [str(normalise_colour(option)) for option in goal_options]
    chosen = [normalise_colour(option) for option in options.values()]
    n_opt = sum(any(token_set_ratio(have, want) > 85 for have in chosen) for want in wanted)

    r_price = price <= goal["price_upper"]
    return r_type * ((n_att + n_opt + r_price) / (len(goal["attributes"]) + len(wanted) + 1))
