"""The client of a real WebShop server: recorded exchanges, the built-in WebShop served, and faults."""

import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from html import escape
from urllib.parse import parse_qsl

import pytest
from conftest import DATA, ROOT, Again, refusal, table

import environments
import envs
from environments import make
from environments.expert_files import opening_difference
from environments.webshop import catalogue
from environments.webshop.server import Client, WebShopServer
from environments.webshop.shop import Place, WebShop


@pytest.fixture(autouse=True)
def forgets():
    Client.instructions.clear()  # a port may be another server's
    Client.ready.clear()


@pytest.fixture
def shop_server(serve):
    """shop_server(answer) starts a server that returns answer(method, path, form)."""
    return lambda answer: serve(lambda handler, body: (
        handler.command, handler.path, dict(parse_qsl(body, keep_blank_values=True))),
        answer, "HTTP/1.1")


def client(server, view="full"):
    return WebShopServer(server.url, view)


# ------------------------------------------------------------------------- recorded exchanges


@pytest.fixture
def recorded(shop_server):
    text = (DATA / "webshop/recorded_exchanges.json").read_text(encoding="utf-8")
    exchanges = json.loads(re.sub(r"rec\d_fixed", "coevolve_fixed", text))
    answers = {(x["method"], x["url"], json.dumps(x["form"] or {})):
               (x["status"], x["html"], x["location"]) for x in exchanges}
    server = shop_server(lambda method, path, form: answers.get(
        (method, path, json.dumps(form)), (404, "<h1>Not Found</h1>", None)))
    server.texts = {x["label"][:2]: x["text"] for x in exchanges if x["text"]}
    return server


def test_recorded_episode_gives_the_official_text_and_reward(recorded):
    shop = client(recorded)
    assert shop.reset("webshop-test-11") == recorded.texts["01"]
    for label, action in table("""
            02 -> search[oat granola non gmo]
            03 -> click[Next >]
            04 -> click[< Prev]
            05 -> click[B0HVDGAJ09]
            06 -> click[baker's choice]
            07 -> click[12 ounce (pack of 2)]
            08 -> click[Description]
            09 -> click[< Prev]"""):
        step = shop.step(action)
        assert step == envs.Step(recorded.texts[label], 0.0, False) and not step.idle
    step = shop.step("click[Buy Now]")
    assert step == envs.Step("Thank you for shopping with us! [SEP] Your code:", 0.8, True)
    assert recorded.texts["10"].startswith(step.observation)
    with pytest.raises(envs.EnvError, match="goal 9999 at http://127.0.0.1.* not in the server's "
                                              "catalogue; start the server with all products"):
        shop.reset("webshop-train-9999")


# ------------------------------------------------------------------ a site of a few pages


def page_of(text, buttons=()):
    """Returns a page in the form of an official server's. `buttons` maps texts to addresses."""
    forms = "".join(f'<form method="post" action="{address}"><button class="btn">{name}</button>'
                    "</form>" for name, address in dict(buttons).items())
    return f"<html><body><h4>Instruction:<br>i need a kettle</h4>\n{forms}\n{text}</body></html>"


def option(name, value, address):
    return f'<input type="radio" name="{name}" value="{value}" data-url="{address}">'


ITEM = page_of('<a class="product-link" href="/p">B0</a>' + option("size", "24 inch/carry", "/o/24%20inch%2Fcarry")
               + option("in/cm", "9", "/o/in%2Fcm") + option("size", "10", "/o/10"), {"Buy Now": "/b"})
SITE = {"/coevolve_fixed_1": page_of('<form action="/s"><input name="search_query"></form>'), "/s": ITEM, "/p": ITEM,
        "/b": "<html><h3 id='reward'><pre>1.0</pre></h3></html>"}


@pytest.fixture
def site(shop_server):
    """site(pages) starts a server of these pages, which returns 404 for others."""
    return lambda pages: shop_server(lambda method, path, form: (
        (200, pages[path], None) if path in pages else (404, "", None)))


def searched(server):
    """Returns a client that has searched, and its page."""
    shop = client(server)
    shop.reset("webshop-test-1")
    return shop, shop.step("search[kettle]").observation


def test_an_option_that_the_server_cannot_route_changes_nothing(site):
    """Its name or value has a slash, for which the official server returns 404. No other page may
    be missing."""
    shop, page = searched(site(SITE))
    for action in "click[24 inch/carry]", "click[9]":
        step = shop.step(action)
        assert step == envs.Step(page, 0.0, False) and step.idle
    with pytest.raises(envs.EnvError, match="HTTP 404 at .*its links"):
        shop.step("click[10]")
    assert shop.step("click[B0]").observation == page and shop.step("click[Buy Now]").reward == 1.0


def test_links_without_the_prefix_of_their_shop_are_an_error(site):
    """Another shop is at the address without the prefix."""
    server = site(SITE | {"/shop/coevolve_fixed_1": SITE["/coevolve_fixed_1"]})
    server.url += "/shop"
    with pytest.raises(envs.EnvError, match="goal 1 at .*/shop: .*outside .*/shop/[^\n]*$"):
        searched(server)


def test_a_search_that_loses_its_words_is_no_reply_to_the_agent(shop_server):
    """A proxy adds a slash by a redirect, and the form is requested by GET without its fields."""
    server = shop_server(lambda method, path, form: (
        (301, "", "/coevolve_fixed_1") if path == "/s" else (200, SITE[path], None)))
    with pytest.raises(envs.EnvError, match="search page again"):
        searched(server)


@pytest.mark.parametrize("buttons, chosen", [({}, "/size"), ({"natural": "/button"}, "/button")])
def test_of_options_that_share_a_value_the_last_is_chosen(site, buttons, chosen):
    """Both official environments read a page into a dictionary of values. A button with this name
    has priority."""
    item = page_of(option("color", "natural", "/color") + option("size", "natural", "/size"), buttons)
    shop, _ = searched(site(SITE | {"/s": item, chosen: item.replace("</body>", "chosen</body>")}))
    assert shop.step("click[natural]").observation.endswith("chosen")


def test_an_official_page_of_attributes_is_read(site):
    """Only attributes_page.html has the instruction in one line with its title."""
    page = ("<html><body><h4>Instruction: i need a kettle</h4><h4>Current Query: ['kettle']</h4>"
            '<form method="post" action="/p"><button class="btn">&lt; Back to Item Page</button>'
            "</form><ul><li><p> easy clean</p></li></ul><h5>garden</h5><h5>kettle</h5>"
            "<h5>Home › Kettles</h5></body></html>")
    shop, _ = searched(site(SITE | {"/s": page_of("", {"Attributes": "/a"}), "/a": page}))
    shown = shop.step("click[Attributes]").observation
    assert shown.endswith("easy clean [SEP] garden [SEP] kettle [SEP] Home › Kettles")
    assert shop.step("click[< back to item page]").observation.endswith("B0")


# --------------------------------------------------------------- the built-in WebShop, served


def as_html(shop, place, address):
    """A page of the built-in WebShop with the controls of an official one."""
    page = shop.follow(place)
    if page.kind == "done":
        return (f"<html><body><h1>{page.pieces[0]}</h1><h3>{page.pieces[1]} </h3><p><pre>5954286D85</pre> "
                f'(Paste it)</p><div style="display:none"><pre>{escape(str(shop.goal))}</pre>'
                f'</div><h3 id="reward">Your score<pre>{page.reward}</pre></h3></body></html>')
    html = "<!DOCTYPE html>\n<html>\n<head><title>Shop</title>\n<script>1 < 2</script></head><body>"
    for piece in page.pieces:
        link, text = page.links.get(piece.lower()), escape(piece)
        to = address(link or place)
        if piece == "Search":
            html += (f'<form method="post" action="{to}"><input id="search_input" name="search_query">'
                     '<button class="btn btn-success"><i class="x"></i>Search</button></form>')
        elif not link:
            html += f"\n  <h4>{text}</h4><!-- <h5>hidden</h5> -->"
        elif piece in dict(link.options).values():
            html += f"\n{option('o', text, to)}\n<label>{text}</label>"
        elif piece.startswith("B0"):
            html += f'<h4><a class="product-link" href="{to}">{text}</a></h5>'
        else:
            html += f'\n<form method="post" action="{to}">\n  <button class="btn btn-primary">{text}</button></form>'
    return html + "\n</body>\n</html>"


@pytest.fixture
def official(shop_server):
    """A server of the built-in WebShop's test goals. `warm` is True once it has its catalogue."""
    shop, places = WebShop(), [Place()]

    def answer(method, path, form):
        if not server.warm:  # each request in the meantime loads the catalogue once
            server.loads += 1
            time.sleep(0.3)
            server.warm = True
        goal, _, n = path.removeprefix("/coevolve_fixed_").partition("/")
        shop.goal = server.goals[int(goal)]

        def address(place):
            if place not in places:
                places.append(place)
            return f"/coevolve_fixed_{goal}/{places.index(place)}"

        if "search_query" in form:
            return 302, "", address(Place("results", query=form["search_query"].lower()))
        return 200, as_html(shop, places[int(n or 0)], address), None

    server = shop_server(answer)
    server.warm, server.loads, server.goals = True, 0, shop.data.goals["test"]
    return server


def any_policy(shop, seed):
    """Clicks at random, also on invalid links."""
    rng = random.Random(seed)

    def act(page):
        links = sorted(shop.page.links) + ["nothing"]
        return f"click[{rng.choice(links)}]" if links[1:] else SEARCH
    return act


TASK, SEARCH = "webshop-test-1", "search[desk lamp]"


def episode(shop, task=TASK, act=None):
    """Returns everything that the agent sees in an episode, by default the expert's."""
    page, act = shop.reset(task), act or catalogue.shop_expert(True)
    seen = [(page, sorted(shop.page.links))]
    for _ in range(10):
        step = shop.step(act(page))
        page = step.observation
        seen.append((step, step.idle, sorted(shop.page.links)))
        if step.done:
            break
    return seen


@pytest.mark.parametrize("view", ["full", "short"])
def test_whole_episodes_equal_the_embedded_shops(official, view):
    embedded, shop = WebShop(view), client(official, view)
    for n in range(12):
        acts = [any_policy(s, n) if n % 2 else catalogue.shop_expert(view == "full")
                for s in (embedded, shop)]
        a, b = (episode(s, f"webshop-test-{n}", act) for s, act in zip((embedded, shop), acts))
        assert a == b
    assert shop.prompt == embedded.prompt


def test_the_requests_of_an_episode(official):
    """Episodes on a goal share a session and a connection. An invalid action sends no request."""
    shop = client(official)
    page = shop.reset("webshop-test-3")
    for action in ["click[Search]", "click[Buy Now]", " search[lamp]", ""]:
        assert shop.step(action) == envs.Step(page, 0.0, False)
    assert len(official.seen) == 1
    assert episode(shop, "webshop-test-3") == episode(shop, "webshop-test-3")
    assert {path.split("/")[1] for _, path, _ in official.seen} == {"coevolve_fixed_3"}
    assert official.connections == 1


def test_tasks_name_goals_by_rule_or_by_lists_without_a_request(tmp_path):
    """A goal that is in no list belongs to the split validation. No server listens."""
    def shop(folder=None):
        return make("webshop", webshop_url="http://127.0.0.1:9/", split_file=folder)

    (tmp_path / "train_indices.json").write_text("[501, 3]")
    for content in "{", "[]", "[500, 2]":  # first the file is missing, then each content but the last is wrong
        assert re.match(f"--split-file {tmp_path}/test_indices.json: ", refusal(shop, str(tmp_path)))
        (tmp_path / "test_indices.json").write_text(content)
    listed = shop(str(tmp_path))
    for env, train, validation, test in (
            (shop(), range(1500, 3124), range(500, 1500), range(500)), (listed, (501, 3), range(502, 1500), (500, 2))):
        assert [[*tasks.values()] for tasks in env.splits.values()] == [[*train], [*validation], [*test]]
    assert listed.tasks("train") == ["webshop-train-501", "webshop-train-3"]
    assert "--experts" in refusal(listed.expert)


PAGE = "WebShop [SEP] Instruction: [SEP] a hat, and price lower than 30.00 dollars [SEP] Search"


@pytest.mark.parametrize("text, same", table(f"""
    {PAGE} -> True
    {PAGE.upper()} -> True
    Task Description: {PAGE} -> True
    {PAGE.replace("a hat", "a  hat")} -> True
    {PAGE.replace("30.00", "120.00")} -> True
    {PAGE.replace(", and price lower than 30.00 dollars", "")} -> True
    {PAGE.replace("hat", "cap")} -> False
    {PAGE} and more -> False
    a hat -> False
    -> False
"""))
def test_openings_are_compared_without_case_and_the_servers_price_limit(text, same):
    """A server draws the price limit anew. The built-in WebShop does not."""
    env, built_in = make("webshop", "short", webshop_url="http://127.0.0.1:9"), make("webshop")
    assert str(opening_difference(env, env.opening(text), PAGE) is None) == same
    assert opening_difference(built_in, built_in.opening(PAGE.replace("30", "40")), PAGE)


# -------------------------------------------------------------------------------------- faults

FORM = ("<html><h4>Instruction:<br>{}</h4><form action='{}'><input name='search_query'></form>"
        "</html>")


@pytest.mark.parametrize("fault, says", [
    ((500, "", None), "HTTP 500"), (None, "check that the server runs"), ("cut", "runs|incomplete"),
    ((200, "<html>Hello</html>", None), "no page of a WebShop"), ((302, "", "/again"), "TooManyRedirects"),
    ((200, FORM.format("buy another", "/"), None), "instruction has changed"),
    ((200, '<html><h3 id="reward"><pre>won</pre></html>', None), "cannot be parsed"),
    ((200, f'<html><h3 id="reward"><pre>{"9" * 400}</pre></html>', None), "at http"),
])
def test_a_fault_ends_the_episode_and_changes_nothing_after_it(official, fault, says):
    shop = client(official)
    expected = episode(shop)
    shop.reset(TASK)
    official.faults = [fault] * 20
    with pytest.raises(envs.EnvError, match=says) as error:
        shop.step(SEARCH)
    assert f"goal 1 at {official.url}" in str(error.value) and "\n" not in str(error.value)
    assert len(official.faults) >= 20 - 6  # redirects are bounded
    official.faults = [] if "instruction" in says else [fault]
    assert episode(Again(shop)) == expected


def test_the_first_request_has_time(official, monkeypatch):
    official.faults = [0.4]
    monkeypatch.setattr(Client, "timeout", 0.1)
    shop = client(official)
    assert shop.reset(TASK).startswith("WebShop")
    official.faults = [0.4]
    with pytest.raises(envs.EnvError, match="ReadTimeout.*has loaded its catalogue"):
        shop.step(SEARCH)


def test_only_one_client_requests_from_a_cold_server(official):
    """The clients are of one process, of two, and of one that noticed a killed server."""
    official.warm, code = False, (
        "from environments.webshop.server import WebShopServer;"
        f"WebShopServer({official.url!r}).reset('webshop-test-0')")
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    shops = [Again(client(official)) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert len({*threads.map(lambda shop: shop.reset(TASK), shops)}) == 1
        assert other.wait() == 0 and official.loads == 1
        official.faults, official.warm = [None], False
        with pytest.raises(envs.EnvError):
            shops[0].env.step(SEARCH)
        assert len({*threads.map(lambda shop: shop.step(SEARCH).observation, shops[1:])}) == 1
    assert official.loads == 2


def test_a_replaced_server_ends_the_run(official):
    """It has other price limits for the goals with even numbers. This is noticed at the start of an
    episode, within it, at a purchase, and before goals that are new to the run. A goal that is the
    same on both servers is played on."""
    shops = [Again(client(official)) for _ in range(5)]
    for n, shop in zip((1, 2, 2, 2, 4), shops):
        found = shop.step(catalogue.shop_expert(False)(shop.reset(f"webshop-test-{n}")))
        shop.step(f"click[{catalogue.read_results(found.observation)[0][0]}]")
    official.goals = [g if n % 2 else dict(g, instruction=g["instruction"].replace("than ", "than 1"))
                      for n, g in enumerate(official.goals)]
    asked = len(official.seen)
    same, begins, goes_on, buys, new = shops
    assert same.step("click[Buy Now]").done
    for act, given in ((begins.reset, "webshop-test-2"), (goes_on.step, "click[< Prev]"), (buys.step, "click[Buy Now]")):
        assert re.match("http.* replaced. Goal 2 was .*--out", refusal(act, given))
    with pytest.raises(environments.UsageError, match="replaced. Goal [24] was "):
        for n in (7, 9, 11):  # with the limits that they had
            new.reset(f"webshop-test-{n}")
    assert len(official.seen) < asked + 15  # nobody tries again until one agrees by chance


@pytest.mark.parametrize("to", r"""
    http://127.0.0.1:{other}/x
    https://127.0.0.1:{port}/x
    http://127.0.0.1:{port}@localhost:{other}/
    http://localhost:{other}\@127.0.0.1:{port}/
    file:///etc/hosts
""".split())
@pytest.mark.parametrize("by", ["redirect", "form"])
def test_no_other_host_is_asked(shop_server, official, to, by):
    other = shop_server(lambda *_: (200, FORM.format("buy", "/"), None))
    to = to.format(port=official.server_port, other=other.server_port)
    shop = client(official)
    if by == "form":  # the page sends the search elsewhere
        official.faults = [(200, FORM.format("buy", to), None)]
    shop.reset(TASK)
    if by == "redirect":
        official.faults = [(302, "", to)]
    with pytest.raises(envs.EnvError, match="another host"):
        shop.step("search[secret]")
    assert other.seen == [] and "secret" not in str(official.seen[-1][1])


def test_no_proxy_comes_between(shop_server, official, monkeypatch):
    proxy = shop_server(lambda *_: (200, "", None))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert client(official).reset(TASK).startswith("WebShop") and proxy.seen == []


def test_a_query_is_sent_as_a_form_field_without_characters_that_break_the_server(official):
    shop = client(official)
    for query, sent in table(f"""
            <r> lamp -> r lamp
            a <r> b -> a <r> b
            ../../etc -> .. .. etc
            Größe é -> größe é
            http://other:80/x?y#z -> http:  other:80 x?y#z
            &search_query=x -> &search_query=x
            {"x" * 5000} -> {"x" * 1000}"""):
        shop.reset(TASK)
        official.seen.clear()
        shop.step(f"search[{query}]")
        assert [(m, f) for m, _, f in official.seen] == [("POST", {"search_query": sent}), ("GET", {})]
