"""Files and pages that are not what they should be: refused by name, whichever way they are odd."""

import json

import pytest

import envs
from worlds.webshop.server import WebShopServer

ENTRY = dict(task="webshop-train-3", reward=1.0, messages=[
    dict(role="user", content="buy"), dict(role="assistant", content="click[a]")])


def open_page(html):
    shop = WebShopServer("http://127.0.0.1:9")
    shop._task = shop._instruction = shop.shown = None
    html = f'<h4>Instruction:<br>buy</h4><input name="search_query">{html}'
    shop._load = lambda *_, **__: (html, "http://127.0.0.1:9/")
    return shop._open("GET", "http://127.0.0.1:9/")


@pytest.mark.parametrize("html", [
    "<form action='http://['>", "<![x]]>", '<h3 id="reward"><pre>1.2.3</pre></h3>',
    '<h3 id="reward"><pre>٣</pre></h3>', '<h3 id="reward"><pre>' + "9" * 400 + "</pre></h3>"])
def test_a_page_that_cannot_be_read_voids_the_episode(html):
    assert open_page("").kind == "search"
    with pytest.raises(envs.EnvError):
        open_page(html)


@pytest.mark.parametrize("text", [
    "[" * 100_000, '{"a":' * 100_000, "\ufeff{}", "7\n", '{"a": ' + "9" * 5000 + "}",
    *(json.dumps([ENTRY | other]) for other in (
        dict(task=7), dict(task="webshop-train-x"), dict(messages=7), dict(messages=[]),
        dict(messages=[{}, {}]), dict(messages=[dict(role="user", content=None)] * 2),
        dict(messages=ENTRY["messages"][:1]), dict(messages=ENTRY["messages"][::-1]),
        dict(messages=[ENTRY["messages"][0], dict(role="assistant", content="\ud800")]),
        dict(reward="1"), dict(reward=float("nan")), dict(reward=9 ** 999))),
    json.dumps([{name: value for name, value in ENTRY.items() if name != "reward"}]),
    json.dumps([ENTRY, ENTRY]), json.dumps([dict(id="webshop_3", conversations=[7])])],
    ids=lambda text: text[:60])
def test_a_file_that_holds_no_trajectories_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "experts.json").write_text(text)
    with pytest.raises(envs.Refused) as error:
        envs.read_experts(tmp_path / "experts.json", envs.make("webshop"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_an_entry_as_it_should_be_is_read(tmp_path):
    (tmp_path / "experts.json").write_text(json.dumps([ENTRY]))
    (found,) = envs.read_experts(tmp_path / "experts.json", envs.make("webshop"))
    assert found == ("webshop-train-3", ENTRY["messages"], 1.0)
