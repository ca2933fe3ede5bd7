"""WebShop on an official server, of which this is a client."""

import os
import re
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit
from weakref import WeakSet

import requests
from filelock import FileLock

from environments import UsageError
from environments.user_files import read_lists
from environments.webshop.shop import DONE, Page, Shop, show
from envs import EnvError

RULE = {"train": range(1500, 1500 + 1624), "validation": range(500, 1500), "test": range(500)}
CHECK = ("see that the address is right, and that the shop's own links have all of it, where a "
         "proxy stands before it")
NO_SHOP = f"this is no page of a WebShop server; {CHECK}"


class WebShopServer(Shop):
    """An official WebShop server, driven as a browser does: by its pages' links and forms. A task
    is the number of a goal; `reset` takes any. By rule splits are those of WebShop's baselines.

    Price limits are drawn when a server starts. Refused where it was replaced: a goal that this
    process has met before reads otherwise now. Before one that is met for the first time another
    one is read again, and after a purchase, whose page does not show it, the episode's own.

    A server loads its catalogue at its first request, and once more for each that comes meanwhile.
    So those that it has not answered since it last failed ask one at a time, on all of a machine.
    It slows down with each session, so every episode on a goal uses the same one.

    An answer is a page of the shop, or EnvError: there is none, an error, another site's page, a
    link or redirect away from the address that was given. One answer counts as an action that
    changes nothing: 404 to an option with a slash in its name or value, which the server does not
    route. Text of a model leaves as the search form's field and in no other way.
    """
    test_splits = ("test",)
    task_of = int
    drawn_anew = r"(?i),?( and)? price lower than [\d,]+(\.\d+)? dollars"

    def __init__(self, webshop_url: str, view: str = "full", split_file: str | None = None,
                 timeout: float = 60.0, load_timeout: float = 1200.0):  # seconds of a request
        super().__init__(view)
        lists = read_lists(split_file, RULE, {"train": "train", "test": "test"}, int,
                           "a JSON list of goal numbers")
        self.splits = {split: {str(goal): goal for goal in goals}
                       for split, goals in lists.items()}
        self._client = Client(webshop_url.rstrip("/"), timeout, load_timeout)

    def start(self, goal: int) -> str:
        return show(self, self._client.begin(goal), first=True)

    def close(self):
        self._client.close()

    def follow(self, link, query: str = "") -> Page:
        if link:
            return self._client.open(link, self.page)
        # A slash would end in a 404, and <r>, <a>, <c>, <q> at the start are commands; a URL has
        # to hold the query, and Lucene takes 1,024 words.
        query = re.sub("^<([racq])>", r"\1", query.replace("/", " "))[:1000]
        return self._client.open(self._client.form, self.page, {"search_query": query})


@dataclass(frozen=True)
class Link:
    """What a click asks for."""
    method: str
    address: str
    product: str | None = None  # whose page it opens
    has_slash: bool = False     # an option's, whose page may be missing


class Client:
    """One that asks a server for pages; `WebShopServer` says how."""
    known = defaultdict(dict)        # server -> goal -> the instruction this process has read
    answered = defaultdict(WeakSet)  # server -> the clients it has answered since it last failed

    def __init__(self, url: str, timeout: float, load_timeout: float):
        self.url = url
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._http = requests.Session()  # keeps its connection
        self._http.trust_env = False     # no proxy may come between, and no saved password
        self._http.max_redirects = 5
        self._http.adapters.clear()  # whatever a page's links and redirects say, no other site
        self._http.mount(f"{url}/", requests.adapters.HTTPAdapter())

    def begin(self, goal: int) -> Page:
        """The first page of an episode on a goal."""
        self._goal = goal
        known = self.known[self.url]
        if known and goal not in known:  # one that is says whether it is the same server
            self._read([*known][goal % len(known)])
        return self._read(goal)

    def _read(self, goal: int) -> Page:
        """A goal's first page; Refused if its instruction is not what this process has read."""
        page = self.open(Link("GET", f"{self.url}/coevolve_fixed_{goal}"))
        before = self.known[self.url].setdefault(goal, self._instruction)
        if before != self._instruction:
            raise UsageError(f"{self.url}: the server was replaced. Goal {goal} was {before[-80:]!r} "
                          f"and is {self._instruction[-80:]!r}; a start draws new price limits, so "
                          "begin a run with another --out")
        return page

    def open(self, link: Link, before: Page | None = None, data: dict | None = None) -> Page:
        """The page behind a link.

        Args:
            link: The link.
            before: The page that it is on; None for the first one of an episode.
            data: Fields of a form.

        Returns:
            The page; `before` itself where the option has no page.

        Raises:
            EnvError: The answer is no page of the shop.
        """
        answer = self._ask(link, data)
        if answer.status_code == 404 and link.has_slash:
            return before
        if answer.status_code == 500 and before is None:
            self._fail("HTTP 500, its answer to a goal that its catalogue does not have; start it "
                       "with all products, or play fewer or other tasks")
        page = self._read_html(answer)
        self.answered[self.url].add(self)
        if page.reward is not None:
            self._read(self._goal)
            return Page("done", DONE, {}, reward=page.reward)

        if before is None and page.form is None:
            self._fail(NO_SHOP)
        if before and page.instruction != self._instruction:
            self._fail("the instruction has changed, as when the server was restarted")
        self._instruction = page.instruction
        if page.form and data:  # a redirect that makes a GET of a POST, for one, loses its fields
            self._fail(f"a search leads to the search page again; {CHECK}")
        if page.form:
            self.form = page.form
            return Page("search", page.pieces, {})
        if "next >" in page.links:
            return Page("results", page.pieces, page.links)
        return Page("item", page.pieces, page.links, link.product or before.item)

    def _read_html(self, answer: requests.Response) -> "_Html":
        """Reads an answer; EnvError where it is no page of a shop."""
        html = answer.content.decode("utf-8", "replace")
        if answer.status_code != 200:
            self._fail(f"HTTP {answer.status_code} at {answer.url[-200:]}; {CHECK}")
        if "</html>" not in html:
            self._fail("a page that ends early")
        try:
            page = _Html(html, answer.url)
        except (ValueError, IndexError, AssertionError) as error:  # an address, a reward, a mark
            self._fail(f"a page that cannot be read ({error})")
        if page.reward is None and not (page.instruction and (page.form or page.links)):
            self._fail(NO_SHOP)
        if page.reward is not None and not 0 <= page.reward <= 1:
            self._fail("the reward of the purchase is not a number in [0, 1]")
        return page

    def _ask(self, link: Link, data: dict | None) -> requests.Response:
        """The answer to a request, after redirects."""
        answered = self.answered[self.url]
        timeout = self._timeout if self in answered else self._load_timeout
        with nullcontext() if self in answered else self._in_turn():
            try:
                return self._http.request(link.method, link.address, data=data,
                                          timeout=(min(10.0, timeout), timeout))
            except requests.exceptions.InvalidSchema as error:  # no adapter, see __init__
                self._fail(f"a link to another host, or outside {self.url}/, is not followed "
                           f"({str(error)[-200:]}); {CHECK}")
            except (requests.RequestException, ValueError) as error:
                answered.clear()  # started again, it loads its catalogue again
                self._fail(f"{type(error).__name__}; see that the server runs, and has loaded its "
                           "catalogue")

    def _in_turn(self):
        """One at a time of all processes of a user on this machine that ask this server."""
        name = f"webshop-{os.getuid()}-{urlsplit(self.url).netloc.replace(':', '-')}"
        return FileLock(Path(tempfile.gettempdir(), name))

    def _fail(self, problem: str):
        raise EnvError(f"goal {self._goal} at {self.url}: {problem}")

    def close(self):
        self._http.close()
        self.answered[self.url].discard(self)


class _Html(HTMLParser):
    """A page of an official server: its text; its links by their text in lower case; the link of
    its search form; the instruction; the reward of a purchase. None: it has none."""
    HIDDEN = ("style", "script", "head", "title")

    def __init__(self, html: str, url: str):
        super().__init__()
        self.pieces = []
        self.links = {}
        self.form = None
        self.instruction = None
        self.reward = None
        self._url = url
        self._action = url    # of the last form
        self._options = {}    # value -> link
        self._text = ""       # since the last tag or comment
        self._hidden = 0      # open elements whose text is not shown
        self._control = None  # the open button or product link: tag, link, its first piece
        self._scored = False  # whether the next <pre> has the reward
        self.feed(html)
        self.close()

        for value, link in self._options.items():  # a button of this name beats it
            self.links.setdefault(value, link)
        for piece, after in zip(self.pieces, [*self.pieces[1:], ""]):
            title, found, text = piece.partition("Instruction:")
            if found and not title:  # the page of attributes has both in one piece
                self.instruction = text.strip() or after
                break

    def handle_starttag(self, tag, attrs):
        self._end_text()
        attrs = {name: value or "" for name, value in attrs}
        classes = attrs.get("class", "").split()
        self._hidden += tag in self.HIDDEN
        if tag == "form":
            self._action = self._address(attrs, "action")
        elif attrs.get("name") == "search_query":
            self.form = Link("POST", self._action)
        elif attrs.get("type") == "radio":  # of two options that share a value the last one
            value = attrs.get("value", "")
            has_slash = "/" in value or "/" in attrs.get("name", "")
            link = Link("GET", self._address(attrs, "data-url"), has_slash=has_slash)
            self._options[value] = link
        if "btn" in classes:
            self._control = tag, Link("POST", self._action), len(self.pieces)
        elif "product-link" in classes:
            self._control = tag, Link("GET", self._address(attrs, "href")), len(self.pieces)
        self._scored |= attrs.get("id") == "reward"

    def _address(self, attrs: dict, name: str) -> str:
        return urljoin(self._url, attrs.get(name, ""))

    def handle_endtag(self, tag):
        self._end_text()
        self._hidden -= tag in self.HIDDEN
        if self._control and tag == self._control[0]:
            _, link, first = self._control
            text = "".join(self.pieces[first:])
            product = text if link.method == "GET" else None
            self.links[text.lower()] = Link(link.method, link.address, product)
            self._control = None
        if tag == "pre" and self._scored:
            self.reward = float(self.pieces[-1])
            self._scored = False

    def handle_data(self, data):
        self._text += data

    def handle_comment(self, data):
        self._end_text()

    def _end_text(self):
        """A piece ends at a tag; one of white space alone counts unless it holds a newline."""
        text = self._text
        self._text = ""
        if text and not self._hidden and (text.strip(" \t\n\f\r") or "\n" not in text):
            self.pieces.append(text.strip())
