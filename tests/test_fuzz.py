"""A little of `bench/fuzz.py`, and inputs with which it, or thinking about it, found something."""

import random

import pytest

import envs
from bench import fuzz
from harness import files
from worlds.webshop.server import WebShopServer


@pytest.mark.parametrize("parse", fuzz.PARSERS, ids=lambda parse: parse.__name__)
def test_odd_inputs_keep_the_contract(parse):
    outcomes = {parse(random.Random(f"test {n}")) for n in range(400)}
    assert len(outcomes) > 1  # neither all refused nor all taken


@pytest.mark.parametrize("html", [
    "<form action='http://['>", "<a class='product-link' href='//[::1'>B0</a>",
    "<input type=radio data-url='http://[x' value=red>", "<![if x]>",
    '<h3 id="reward"><pre>1.2.3</pre></h3>', '<h3 id="reward"><pre>٣</pre></h3>',
    '<h3 id="reward"><pre>' + "9" * 400 + "</pre></h3>",
])
def test_a_page_that_cannot_be_read_voids_the_episode(html):
    shop = WebShopServer("http://127.0.0.1:9")
    shop._task = shop._instruction = shop._shown = None
    shop._load = lambda *_, **__: (f"<html>{html}</html>", "http://127.0.0.1:9/")
    with pytest.raises(envs.EnvError):
        shop._open("GET", "http://127.0.0.1:9/")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\ufeff{}", "{}\r{", "7\n" * 3,
                                  '{"a": ' + "9" * 5000 + "}"])
def test_lines_that_are_no_objects_are_refused(text, tmp_path):
    (tmp_path / "f").write_bytes(text.encode())
    with pytest.raises(files.RunError) as error:
        files.read_jsonl(tmp_path / "f")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    with pytest.raises(envs.Refused):
        envs.read_experts(tmp_path / "f", envs.make("webshop"))
