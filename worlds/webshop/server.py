"""WebShop on an official server, of which this is a client."""

import os
import re
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit
from weakref import WeakSet

import requests
from filelock import FileLock

from worlds import EnvError, Refused
from worlds.published import read_lists
from worlds.webshop.shop import DONE, Shop, Shown

RULE = {"train": range(1500, 1500 + 1624), "validation": range(500, 1500), "test": range(500)}


class WebShopServer(Shop):
    """An official WebShop server, driven as a browser does: by its pages' links and forms. A task
    is the number of a goal; `reset` takes any. By rule splits are those of WebShop's baselines.

    Price limits are drawn when a server starts. Refused where it was replaced: a goal that this
    process has met before reads otherwise now. Before one that is met for the first time another
    one is read again, and after a purchase, whose page does not show it, the episode's own.

    A server loads its catalogue at its first request, and once more for each that comes meanwhile.
    So those that it has not answered since it last failed ask one at a time, on all of a machine.
    It slows down with each session, so every episode on a goal uses the same one.

    EnvError at the first request that fails: no answer, errors, a broken page, a link or redirect
    to another host. A link without a page (404, for an option name with a slash) does nothing. Text
    of a model leaves as the search form's field and in no other way.
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
        self._seen = set()
        return self._show(self._client.begin(goal))

    def expert(self):
        raise Refused("the scripted expert knows the embedded shop's instructions only; for a "
                      "WebShop server give expert trajectories with --experts FILE")

    def close(self):
        self._client.close()

    def _follow(self, link, query: str = "") -> Shown:
        if link:
            return self._client.open(self.shown, *link)
        # A slash would end in a 404, and <r>, <a>, <c>, <q> at the start are commands; a URL has
        # to hold the query, and Lucene takes 1,024 words.
        query = re.sub("^<([racq])>", r"\1", query.replace("/", " "))[:1000]
        return self._client.open(self.shown, "POST", self._client.form,
                                 data={"search_query": query})


class Client:
    """One that asks a server for pages; `WebShopServer` says how."""
    known = defaultdict(dict)        # server -> goal -> the instruction this process has read
    answered = defaultdict(WeakSet)  # server -> the clients it has answered since it last failed
    loading = set()                  # servers that did not answer a first request in time

    def __init__(self, url: str, timeout: float, load_timeout: float):
        self.url, self._timeout, self._load_timeout = url, timeout, load_timeout
        self._http = requests.Session()  # keeps its connection
        self._http.trust_env = False     # no proxy may come between, and no saved password
        self._http.max_redirects = 5
        self._http.adapters.clear()  # whatever a page's links and redirects say, no other host
        self._http.mount(urljoin(url, "/"), requests.adapters.HTTPAdapter())

    def begin(self, goal: int) -> Shown:
        """The first page of an episode on a goal."""
        self._goal, known = goal, self.known[self.url]
        if known and goal not in known:  # one that is says whether it is the same server
            first = [*known][:8]
            self._read(first[len(known) % len(first)])
        return self._read(goal)

    def _read(self, goal: int) -> Shown:
        """A goal's first page; Refused if its instruction is not what this process has read."""
        page = self.open(None, "GET", f"{self.url}/coevolve_fixed_{goal}")
        before = self.known[self.url].setdefault(goal, self._instruction)
        if before != self._instruction:
            raise Refused(f"{self.url}: the server was replaced. Goal {goal} was {before[-80:]!r} "
                          f"and is {self._instruction[-80:]!r}; a start draws new price limits, so "
                          "begin a run with another --out")
        return page

    def open(self, before: Shown | None, method: str, url: str, item=None, data=None) -> Shown:
        """The page at `url`; before: the page that it follows, which stays if there is none (404),
        None for the first one of an episode. item: of a product link."""
        found = self._load(method, url, data, opening=before is None)
        if found is None:
            return before
        try:
            page = _Html(*found)
        except (ValueError, IndexError, AssertionError) as error:  # an address, a reward, a mark
            self._fail(f"a page that cannot be read ({error})")
        if page.reward is not None:
            if not 0 <= page.reward <= 1:
                self._fail("the reward of the purchase is not a number in [0, 1]")
            self._read(self._goal)
            return Shown("done", DONE, {}, reward=page.reward)
        if page.instruction is None or (before is None and page.form is None):
            self._fail("this is no page of a WebShop server; see that the address is right")
        if before and page.instruction != self._instruction:
            self._fail("the instruction has changed, as when the server was restarted")
        self._instruction, self.form = page.instruction, page.form or self.form
        kind = ("search" if page.form is not None else
                "results" if "next >" in page.links else "item")
        return Shown(kind, page.pieces, {} if kind == "search" else page.links,
                     (item or before.item) if kind == "item" else None)

    def _load(self, method: str, url: str, data, opening: bool) -> tuple[str, str] | None:
        """HTML and address of the page at `url` after redirects; None if there is none."""
        answered = self.answered[self.url]
        with nullcontext() if self in answered else self._in_turn():
            if self.url in self.loading:  # it would load its catalogue once more
                self._fail(f"no answer to the first request in {self._load_timeout:,.0f} s, in "
                           "which it loads its catalogue; start again when it has")
            timeout = self._timeout if self in answered else self._load_timeout
            try:
                found = self._http.request(method, url, data=data,
                                           timeout=(min(10.0, timeout), timeout))
            except requests.exceptions.InvalidSchema as error:  # no adapter, see __init__
                self._fail(f"refused to follow it to another host: {str(error)[-200:]}")
            except (requests.RequestException, ValueError) as error:
                if isinstance(error, requests.ReadTimeout) and self not in answered:
                    self.loading.add(self.url)
                answered.clear()  # started again, it loads its catalogue again
                self._fail(f"{type(error).__name__}; see that the server runs")
        status, html = found.status_code, found.content.decode("utf-8", "replace")
        if status == 200 and "</html>" in html:
            answered.add(self)
            return html, found.url
        if status == 404 and not opening:
            return None
        self._fail((f"HTTP {status}" if status != 200 else "a page that ends early")
                   + (", its answer to a goal that its catalogue does not have; start it with all "
                      "products, or play fewer or other tasks") * (opening and status == 500))

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
    """A page of an official server: its text; its links, lowercased text -> (method, address,
    product of a product's link); where its form posts a search; the reward of a purchase."""
    HIDDEN = ("style", "script", "head", "title")

    def __init__(self, html: str, url: str):
        super().__init__()
        self.pieces, self.links, self.form, self.reward = [], {}, None, None
        self._url, self._action = url, url
        self._values = set()  # of options
        self._text = ""       # since the last tag or comment
        self._hidden = 0      # open elements whose text is not shown
        self._control = None  # the open button or product link: tag, method, address, first piece
        self._scored = False  # whether the next <pre> has the reward
        self.feed(html)
        self.close()
        self.instruction = None
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
            self._action = urljoin(self._url, attrs.get("action", ""))
        elif attrs.get("name") == "search_query":
            self.form = self._action
        elif attrs.get("type") == "radio":
            link = "GET", urljoin(self._url, attrs.get("data-url", "")), None
            value = attrs.get("value", "")
            if value not in self.links or value in self._values:  # a button of this name beats it
                self.links[value] = link  # and of two options that share a value the last one
                self._values.add(value)
        if "btn" in classes:
            self._control = tag, "POST", self._action, len(self.pieces)
        elif "product-link" in classes:
            address = urljoin(self._url, attrs.get("href", ""))
            self._control = tag, "GET", address, len(self.pieces)
        self._scored |= attrs.get("id") == "reward"

    def handle_endtag(self, tag):
        self._end_text()
        self._hidden -= tag in self.HIDDEN
        if self._control and tag == self._control[0]:
            _, method, address, first = self._control
            text = "".join(self.pieces[first:])
            self.links[text.lower()] = method, address, text if method == "GET" else None
            self._values.discard(text.lower())
            self._control = None
        if tag == "pre" and self._scored:
            self.reward, self._scored = float(self.pieces[-1]), False

    def handle_data(self, data):
        self._text += data

    def handle_comment(self, data):
        self._end_text()

    def _end_text(self):
        """A piece ends at a tag; one of white space alone counts unless it holds a newline."""
        text, self._text = self._text, ""
        if text and not self._hidden and (text.strip(" \t\n\f\r") or "\n" not in text):
            self.pieces.append(text.strip())
