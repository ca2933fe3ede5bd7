"""WebShop on a real server: a client for the official web application."""

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

# Goal numbers of the splits without --split-file, in the ranges that WebShop's baselines use
RULE = {"train": range(1500, 1500 + 1624), "validation": range(500, 1500), "test": range(500)}
CHECK = ("check the address; if the server is behind a proxy, its links must begin with the whole "
         "address")
NO_WEBSHOP = f"this is no page of a WebShop server; {CHECK}"


class WebShopServer(Shop):
    """WebShop on a real server. The client follows the links and forms of its pages, as a browser.

    The key of a task is the number of a goal, and `reset` accepts any goal of the server.

    Each start of a server draws new price limits. A run must not mix them, so the client raises
    UsageError if the server was replaced, which shows in the instruction of a goal that this
    process has read before. It compares the instruction whenever an episode begins. Before the
    first episode on a goal, which has no earlier instruction, it reads another goal again. After a
    purchase it reads the goal of the episode again, since that page does not show the instruction.

    A server loads its catalogue at the first request, and once more for each request that arrives
    meanwhile. Until a server has answered a client, and again after it failed, the processes of a
    user on a machine therefore send their requests one at a time. A server also gets slower with
    each session, so all episodes on a goal use the same session.

    Every response must be a page of WebShop, within the address that the user gave. EnvError is
    raised if there is no response, or if it is an error or a page of another site. There is one
    exception: the server cannot route an option with a slash in its name or value, so a 404
    response to such an option counts as an action that changes nothing.

    Text of the model is only ever sent as the field of the search form.
    """
    test_splits = ("test",)
    task_of = int
    drawn_anew = r"(?i),?( and)? price lower than [\d,]+(\.\d+)? dollars"

    def __init__(self, webshop_url: str, view: str = "full", split_file: str | None = None,
                 timeout: float = 60.0, load_timeout: float = 1200.0):
        """
        Args:
            webshop_url: The address of the server.
            view: "full" or "short".
            split_file: The folder of ETO's or IPR's task lists, or None for the splits of RULE.
            timeout: Seconds that a request may take.
            load_timeout: Seconds that a request may take while the server loads its catalogue.
        """
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
        # The server answers a slash with 404, and takes <r>, <a>, <c> and <q> at the start of a
        # query for commands. The query becomes part of a URL, and Lucene accepts 1,024 words.
        query = re.sub("^<([racq])>", r"\1", query.replace("/", " "))[:1000]
        return self._client.open(self._client.form, self.page, {"search_query": query})


@dataclass(frozen=True)
class Link:
    """The request that a click sends."""
    method: str
    address: str
    product: str | None = None  # product number, if the link opens the page of a product
    has_slash: bool = False     # True for an option that the server may be unable to route


class Client:
    """Requests pages of a server, by the rules that `WebShopServer` describes."""
    instructions = defaultdict(dict)  # server -> goal -> instruction that this process has read
    ready = defaultdict(WeakSet)      # server -> clients that it has answered since it last failed

    def __init__(self, url: str, timeout: float, load_timeout: float):
        self.url = url
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._http = requests.Session()  # keeps the connection open
        self._http.trust_env = False     # use no proxy and no saved password of the machine
        self._http.max_redirects = 5
        self._http.adapters.clear()  # links and redirects cannot lead to another site
        self._http.mount(f"{url}/", requests.adapters.HTTPAdapter())

    def begin(self, goal: int) -> Page:
        """Returns the first page of an episode on a goal."""
        self._goal = goal
        goals_read = self.instructions[self.url]
        if goals_read and goal not in goals_read:  # another goal shows if it is the same server
            self._read([*goals_read][goal % len(goals_read)])
        return self._read(goal)

    def _read(self, goal: int) -> Page:
        """Returns the first page of a goal. Raises UsageError if the instruction differs from the
        one that this process has read before."""
        page = self.open(Link("GET", f"{self.url}/coevolve_fixed_{goal}"))
        before = self.instructions[self.url].setdefault(goal, self._instruction)
        if before != self._instruction:
            raise UsageError(f"{self.url}: the server was replaced. Goal {goal} was "
                             f"{before[-80:]!r} and is {self._instruction[-80:]!r}. Each start "
                             "draws new price limits; start a new run with another --out")
        return page

    def open(self, link: Link, before: Page | None = None, data: dict | None = None) -> Page:
        """Returns the target page of a link.

        Args:
            link: The link.
            before: The page that contains the link, or None for the first request of an episode.
            data: The fields of a form, or None.

        Returns:
            The page. If the link is an option that the server cannot route, it is `before`.

        Raises:
            EnvError: If the response is no page of WebShop.
        """
        response = self._request(link, data)
        if response.status_code == 404 and link.has_slash:
            return before
        if response.status_code == 500 and before is None:
            self._fail("HTTP 500, as for a goal that is not in the server's catalogue; start the "
                       "server with all products, or choose fewer or other tasks")
        page = self._read_html(response)
        self.ready[self.url].add(self)
        if page.reward is not None:
            self._read(self._goal)
            return Page("done", DONE, {}, reward=page.reward)

        if before is None and page.form is None:
            self._fail(NO_WEBSHOP)
        if before and page.instruction != self._instruction:
            self._fail("the instruction has changed, as it does if the server is restarted")
        self._instruction = page.instruction
        if page.form and data:  # a redirect that turns a POST into a GET loses its fields
            self._fail(f"a search leads to the search page again; {CHECK}")
        if page.form:
            self.form = page.form
            return Page("search", page.pieces, {})
        if "next >" in page.links:
            return Page("results", page.pieces, page.links)
        return Page("item", page.pieces, page.links, link.product or before.item)

    def _read_html(self, response: requests.Response) -> "_Html":
        """Parses a response. Raises EnvError if it is no page of WebShop."""
        html = response.content.decode("utf-8", "replace")
        if response.status_code != 200:
            self._fail(f"HTTP {response.status_code} at {response.url[-200:]}; {CHECK}")
        if "</html>" not in html:
            self._fail("the page is incomplete")
        try:
            page = _Html(html, response.url)
        except (ValueError, IndexError, AssertionError) as error:  # an address, reward or tag
            self._fail(f"the page cannot be parsed ({error})")
        if page.reward is None and not (page.instruction and (page.form or page.links)):
            self._fail(NO_WEBSHOP)
        if page.reward is not None and not 0 <= page.reward <= 1:
            self._fail("the reward of the purchase is not a number in [0, 1]")
        return page

    def _request(self, link: Link, data: dict | None) -> requests.Response:
        """Returns the response to a request, after redirects."""
        ready = self.ready[self.url]
        timeout = self._timeout if self in ready else self._load_timeout
        with nullcontext() if self in ready else self._lock():
            try:
                return self._http.request(link.method, link.address, data=data,
                                          timeout=(min(10.0, timeout), timeout))
            except requests.exceptions.InvalidSchema as error:  # no adapter, see __init__
                self._fail(f"a link leads to another host, or outside {self.url}/, and is not "
                           f"followed ({str(error)[-200:]}); {CHECK}")
            except (requests.RequestException, ValueError) as error:
                ready.clear()  # a server that is restarted loads its catalogue again
                self._fail(f"{type(error).__name__}; check that the server runs, and that it has "
                           "loaded its catalogue")

    def _lock(self):
        """Returns a lock for requests to this server, shared by all processes of the user on this
        machine."""
        name = f"webshop-{os.getuid()}-{urlsplit(self.url).netloc.replace(':', '-')}"
        return FileLock(Path(tempfile.gettempdir(), name))

    def _fail(self, problem: str):
        raise EnvError(f"goal {self._goal} at {self.url}: {problem}")

    def close(self):
        self._http.close()
        self.ready[self.url].discard(self)


class _Html(HTMLParser):
    """Parses a page of a real server.

    Attributes:
        pieces: The visible texts.
        links: A dict {text in lower case: `Link`} of buttons, products and options.
        form: The link of the search form, or None.
        instruction: The instruction, or None.
        reward: The reward of a purchase, or None.
    """
    HIDDEN = ("style", "script", "head", "title")

    def __init__(self, html: str, url: str):
        super().__init__()
        self.pieces = []
        self.links = {}
        self.form = None
        self.instruction = None
        self.reward = None
        self._url = url
        self._action = url    # address of the last form
        self._options = {}    # value of an option -> link
        self._text = ""       # text since the last tag or comment
        self._hidden = 0      # number of open elements whose text is not shown
        self._control = None  # the open button or product link: (tag, link, index of its 1st piece)
        self._scored = False  # True if the next <pre> has the reward
        self.feed(html)
        self.close()

        for value, link in self._options.items():  # a button with this text takes precedence
            self.links.setdefault(value, link)
        for piece, next_piece in zip(self.pieces, [*self.pieces[1:], ""]):
            before, label, text = piece.partition("Instruction:")
            if label and not before:
                # The page of attributes has the label and the instruction in one piece.
                self.instruction = text.strip() or next_piece
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
        elif attrs.get("type") == "radio":  # if two options share a value, the last one counts
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
        """Ends the current piece, as every tag and comment does. A piece of whitespace alone counts
        only if it has no newline."""
        text = self._text
        self._text = ""
        if text and not self._hidden and (text.strip(" \t\n\f\r") or "\n" not in text):
            self.pieces.append(text.strip())
