"""The environment WebShop on a real server, with a client for the official web application."""

import os
import re
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests
from bs4 import BeautifulSoup, NavigableString
from filelock import FileLock

from environments import UsageError
from environments.user_files import read_lists
from environments.webshop.pages import DONE, Page, Shop
from envs import EnvError

# The default splits are ranges of goal numbers, as in WebShop's baselines.
RULE = {"train": range(1500, 1500 + 1624), "validation": range(500, 1500), "test": range(500)}
CHECK = ("check the address; if the server is behind a proxy, its links must begin with the whole "
         "address")
NO_WEBSHOP = f"this is no page of a WebShop server; {CHECK}"


class WebShopServer(Shop):
    """Client of a real WebShop server. It follows links and submits forms, like a browser.

    The key of a task is the number of a goal. `reset` accepts the number of any goal on the server.

    Restarted servers. A server draws new random price limits each time it starts. Results with
    different price limits cannot be compared, so the client raises UsageError if the server was
    restarted during a run. To detect this, the client stores the instruction of every goal. When it
    requests a goal again, it compares the two instructions. Before a new goal, the client requests
    an earlier goal again. After a purchase, it requests the goal of the episode again, because the
    page after a purchase does not show the instruction.

    Load. A server loads its catalogue at the first request, and once more for each request that
    arrives before the catalogue is loaded. The process therefore holds a file lock during each
    request until it has received its first page, and again after the server has failed. All
    processes of this user on this machine then send one request at a time. A server also gets
    slower with each session, so all episodes with the same goal use the same session.

    Errors. Every response must be a WebShop page at the address that the user gave. Otherwise the
    client raises EnvError. The one exception is an option with a slash. The server cannot route it
    and responds with status 404. The page then does not change, and the episode continues.

    Safety. Only the search form sends text that the model wrote.

    Args:
        split_file: The folder with ETO's or IPR's task lists, or None for the splits of RULE.
    """
    test_splits = ("test",)
    task_of = int
    drawn_anew = r"(?i),?( and)? price lower than [\d,]+(\.\d+)? dollars"

    def __init__(self, webshop_url: str, view: str = "full", split_file: str | None = None):
        super().__init__(view)
        lists = read_lists(split_file, RULE, {"train": "train", "test": "test"}, int,
                           "a JSON list of goal numbers")
        self.splits = {split: {str(goal): goal for goal in goals}
                       for split, goals in lists.items()}
        self._client = Client(webshop_url.rstrip("/"))

    def start(self, goal: int) -> str:
        return self.show(self._client.begin(goal), first=True)

    def close(self):
        self._client.close()

    def follow(self, link, query: str = "") -> Page:
        if link:
            return self._client.open(link, self.page)
        # The server responds to a slash with status 404, and interprets <r>, <a>, <c> or <q> at the
        # start of a query as a command. The query is truncated, because Lucene accepts at most
        # 1,024 words, and because the query becomes part of a URL.
        query = re.sub("^<([racq])>", r"\1", query.replace("/", " "))[:1000]
        return self._client.open(self._client.form, self.page, {"search_query": query})


@dataclass(frozen=True)
class Link:
    """The HTTP request that a click or a search sends."""
    method: str
    address: str
    product: str | None = None  # product number if the link opens an item page, otherwise None
    has_slash: bool = False     # True for an option with a slash, which may lead to a 404 response


class Client:
    """An HTTP client for a WebShop server (see `WebShopServer`)."""
    timeout = 60.0         # timeout of a request in seconds
    load_timeout = 1200.0  # timeout of a request while the server may be loading its catalogue
    # {server URL: {goal: instruction}} of all goals that this process has read
    instructions = defaultdict(dict)
    ready = set()  # URLs of servers that have responded to this process since they last failed

    def __init__(self, url: str):
        self.url = url
        self._http = requests.Session()  # reuses the connection for later requests
        self._http.trust_env = False     # ignore proxies and passwords in the user's configuration
        self._http.max_redirects = 5
        self._http.adapters.clear()  # no adapter for other URLs, so links cannot leave this server
        self._http.mount(f"{url}/", requests.adapters.HTTPAdapter())

    def begin(self, goal: int) -> Page:
        """Begins an episode with a goal, and returns its first page."""
        self._goal = goal
        goals_read = self.instructions[self.url]
        if goals_read and goal not in goals_read:
            self._read([*goals_read][goal % len(goals_read)])
        return self._read(goal)

    def _read(self, goal: int) -> Page:
        """Requests the first page of a goal. Raises UsageError if its instruction has changed."""
        page = self.open(Link("GET", f"{self.url}/coevolve_fixed_{goal}"))
        before = self.instructions[self.url].setdefault(goal, self._instruction)
        if before != self._instruction:
            raise UsageError(f"{self.url}: the server was replaced. Goal {goal} was "
                             f"{before[-80:]!r} and is {self._instruction[-80:]!r}. Each start "
                             "draws new price limits; start a new run with another --out")
        return page

    def open(self, link: Link, before: Page | None = None, data: dict | None = None) -> Page:
        """Follows a link and returns the page, or `before` if the server cannot route an option.

        Args:
            before: The page that contains the link, or None for the first request of an episode.
            data: The fields of a form to send, or None.
        """
        response = self._request(link, data)
        if response.status_code == 404 and link.has_slash:
            return before
        if response.status_code == 500 and before is None:
            self._fail("HTTP 500, as for a goal that is not in the server's catalogue; start the "
                       "server with all products, or choose fewer or other tasks")
        page = self._read_html(response)
        self.ready.add(self.url)
        if page.reward is not None:
            self._read(self._goal)
            return Page("done", DONE, {}, reward=page.reward)

        if before is None and page.form is None:
            self._fail(NO_WEBSHOP)
        if before and page.instruction != self._instruction:
            self._fail("the instruction has changed, as it does if the server is restarted")
        self._instruction = page.instruction
        # The response to a search must not be the search page. The server responds with the search
        # page if a redirect changes the POST request to a GET request without the form's fields.
        if page.form and data:
            self._fail(f"a search leads to the search page again; {CHECK}")
        if page.form:
            self.form = page.form
            return Page("search", page.pieces, {})
        if "next >" in page.links:
            return Page("results", page.pieces, page.links)
        return Page("item", page.pieces, page.links, link.product or before.item)

    def _read_html(self, response: requests.Response) -> "ServerPage":
        """Parses a response. Raises EnvError if it is not a complete WebShop page."""
        html = response.content.decode("utf-8", "replace")
        if response.status_code != 200:
            self._fail(f"HTTP {response.status_code} at {response.url[-200:]}; {CHECK}")
        if "</html>" not in html:
            self._fail("the page is incomplete")
        try:
            page = read_page(html, response.url)
        except (ValueError, AssertionError) as error:  # invalid address, reward or tag
            self._fail(f"the page cannot be parsed ({error})")
        if page.reward is None and not (page.instruction and (page.form or page.links)):
            self._fail(NO_WEBSHOP)
        if page.reward is not None and not 0 <= page.reward <= 1:
            self._fail("the reward of the purchase is not a number in [0, 1]")
        return page

    def _request(self, link: Link, data: dict | None) -> requests.Response:
        """Sends a request, follows redirects, and returns the response."""
        is_ready = self.url in self.ready
        timeout = self.timeout if is_ready else self.load_timeout
        with nullcontext() if is_ready else self._lock():
            try:
                return self._http.request(link.method, link.address, data=data,
                                          timeout=(min(10.0, timeout), timeout))
            except requests.exceptions.InvalidSchema as error:  # no adapter for this URL
                self._fail(f"a link leads to another host, or outside {self.url}/, and is not "
                           f"followed ({str(error)[-200:]}); {CHECK}")
            except (requests.RequestException, ValueError) as error:
                self.ready.discard(self.url)  # a restarted server has to load its catalogue again
                self._fail(f"{type(error).__name__}; check that the server runs, and that it has "
                           "loaded its catalogue")

    def _lock(self):
        name = f"webshop-{os.getuid()}-{urlsplit(self.url).netloc.replace(':', '-')}"
        return FileLock(Path(tempfile.gettempdir(), name))

    def _fail(self, problem: str):
        raise EnvError(f"goal {self._goal} at {self.url}: {problem}")

    def close(self):
        self._http.close()


@dataclass
class ServerPage:
    """A parsed page of a real server."""
    pieces: list[str]        # the visible texts, split at HTML tags
    # {text: Link} of the buttons, products and options; texts of buttons and products in lower case
    links: dict[str, Link]
    form: Link | None        # the search form, or None if the page has none
    instruction: str | None  # the instruction, or None if the page does not show it
    reward: float | None     # the reward of the purchase, or None if the page shows none


def read_page(html: str, url: str) -> ServerPage:
    """Parses a page as WebShop's own text environment does.

    Raises ValueError if a link's address or the reward is invalid.
    """
    soup = BeautifulSoup(html, "html.parser")

    def address(tag, name: str) -> str:
        return urljoin(url, tag.get(name, ""))

    def submit(tag) -> Link:
        form = tag.find_previous("form")
        return Link("POST", address(form, "action") if form else url)

    links = {}
    for tag in soup.select(".btn, .product-link"):
        text = "".join(visible_texts(tag))
        link = submit(tag)
        if "btn" not in tag["class"]:
            link = Link("GET", address(tag, "href"), product=text)
        links[text.lower()] = link
    options = {}  # if two options have the same value, the later one replaces the earlier one
    for tag in soup.select('input[type="radio"]'):
        value = tag.get("value", "")
        has_slash = "/" in value or "/" in tag.get("name", "")
        options[value] = Link("GET", address(tag, "data-url"), has_slash=has_slash)
    for value, link in options.items():
        links.setdefault(value, link)

    pieces = visible_texts(soup)
    instruction = None
    for piece, next_piece in zip(pieces, [*pieces[1:], ""]):
        before, label, text = piece.partition("Instruction:")
        if label and not before:
            # Only the sub-page "Attributes" shows the label and the instruction in the same piece.
            instruction = text.strip() or next_piece
            break
    search = soup.find(attrs={"name": "search_query"})
    reward = soup.select_one("#reward pre, pre#reward")
    return ServerPage(pieces, links, search and submit(search), instruction,
                      reward and float(reward.get_text()))


def visible_texts(tag) -> list[str]:
    """Returns the stripped visible texts in a tag, except whitespace that contains a newline."""
    texts = []
    for text in tag.find_all(string=True):
        is_text = type(text) is NavigableString and not text.find_parent(["head", "title"])
        if is_text and (text.strip() or "\n" not in text):
            texts.append(text.strip())
    return texts
