"""Pretraining of a tiny model, on a recipe of seconds, and what the shipped one is."""

import random
import re

import pytest
from transformers import AutoTokenizer

from engine import models
from engine.chat import Encoder
from environments.intercodesql.questions import HELD_OUT
from environments.scienceworld import environment as science
from environments.webshop import catalogue
from envs import Environment, Step
from lab.pretrain import pretrain
from lab.pretrain.practice import Words, exchange, pattern, play
from lab.pretrain.recipes import intercodesql, scienceworld, webshop


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_recipe_makes_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "COPY_BATCHES", 1)
    for name in ("first", "again"):
        pretrain.make(tmp_path / name, {"webshop": (8, 1), "intercodesql": (8, 2)}, width=16)
    assert contents(tmp_path / "first") == contents(tmp_path / "again")
    model = models.read_model(tmp_path / "first")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "first"))
    assert "8 of webshop 1 times" in (tmp_path / "first/README.md").read_text()


class Echo(Environment):
    """Says a reply again, and ends with "end"."""
    name, splits, max_steps = "echo", {"train": {}}, 6

    def step(self, reply):
        return Step(reply.upper(), 0.0, reply == "end")


@pytest.mark.parametrize("chances, expected", [
    # It means a, b, ...; a slip is s and then t. Each letter is a chance: x slips.
    ("....", "a A b B c C end"), (".x..", "a A s S t T b B c C end"), ("x...", "s S t T a A b B c C end"),
    ("x.x.", "s S t T a A s S t T b B"), ("xxxx", "s S t T s S t T s S t T")])
def test_a_player_who_slips_goes_on_as_if_it_had_not(chances, expected):
    class Chances(random.Random):
        def random(self):
            return float(left.pop(0) == "x") if left else 0.0

    left = [".", *chances]  # the first one is of the skill
    heard, meant = [], iter(["a", "b", "c", "end"])

    def means(observation):
        heard.append(observation)
        return next(meant)

    talk = play(Echo(), "page", means, lambda page: ["s", "t"], Chances())
    said = [m["content"] for m in talk]
    assert said[0] == "page" and [m["role"] for m in talk[:2]] == ["user", "assistant"]
    assert said[1:] == expected.split()[:11]  # six replies, and no observation after the last
    assert heard == ["page", "A", "B", "C"][:len(heard)]


def test_a_word_is_exchanged_alike_in_all_of_a_conversation():
    kinds = [Words(("car", "boat"), ("crow", "fox"))]
    talk = [{"role": "user", "content": "how many cars? boats, carts, Car"},
            {"role": "assistant", "content": "DESC car_info; car_id; scar"}]
    found = set()
    for seed in range(40):
        asked, said = [m["content"] for m in exchange(random.Random(seed), talk, kinds,
                                                      ["gnu", "owl", "elk"])]
        car = re.fullmatch(r"DESC (\w+)_info; (\w+)_id; scar", said)
        boat = re.fullmatch(rf"how many {car[1]}s\? (\w+)s, carts, Car", asked)
        assert car[1] == car[2] != boat[1]
        found |= {car[1], boat[1]}
    assert found == {"crow", "fox", "gnu", "owl", "elk"}
    assert exchange(random.Random(0), talk, [Words(("car",), ("fox",), 0.0)], []) == talk


def test_shoppers_know_no_goal_of_a_split_and_open_no_product_that_is_held_out():
    shop, talks = catalogue.shop_data(), webshop.conversations(0, 200)
    first = " ".join(talk[0]["content"] for talk in talks)
    assert not any(goal["instruction"] in first for split in shop.goals.values() for goal in split)
    assert talks[:50] == webshop.conversations(0, 50) != webshop.conversations(1, 50)
    actions = [m["content"] for talk in talks for m in talk[1::2]]
    assert "click[Search]" in actions and len({*map(len, talks)}) > 3  # they make mistakes
    opened = {*re.findall(r"click\[(B0\w{8})\]", " ".join(actions))}
    assert len(opened) > 80
    assert opened <= {p["asin"] for p in shop.products if not p["held_out"]}
    pages = " ".join(m["content"] for talk in talks for m in talk[::2])
    assert any(p["asin"] in pages for p in shop.products if p["held_out"])  # but they are listed


def test_nobody_asks_the_databases_about_what_is_held_out():
    talks, held_out = intercodesql.conversations(0, 120), pattern(tuple(HELD_OUT))
    said = [m["content"] for talk in talks for m in talk[1::2]]
    asked = [talk[0]["content"] for talk in talks] + [q for q in said if q.startswith("SELECT")]
    assert not any(map(held_out.search, asked))
    assert any(map(held_out.search, said))  # but they are described
    assert any("Error" in m["content"] for talk in talks for m in talk)  # they make mistakes
    assert talks[:20] == intercodesql.conversations(0, 20) != intercodesql.conversations(1, 20)


def test_wanderers_lose_their_way(monkeypatch):
    monkeypatch.setattr(science._Simulator, "options",  # a short life repays no second compiler
                        [*science._Simulator.options, "-XX:TieredStopAtLevel=1"])
    talks = scienceworld.conversations(0, 2)
    assert talks[0] != talks[1]
    assert all(talk[-1]["role"] == "assistant" and len(talk) > 3 for talk in talks)


@pytest.mark.parametrize("recipe", [webshop, intercodesql, scienceworld])
def test_what_is_exchanged_becomes_other_words(recipe):
    for kind in recipe.exchanged():
        assert len({*kind.pool}) >= len({*kind.words}) > 1


@pytest.fixture(scope="module")
def conversations():
    return webshop.conversations(0, 200)


@pytest.fixture(scope="module")
def encoder(conversations):
    return Encoder(pretrain.make_tokenizer([m["content"] for talk in conversations for m in talk]))


def test_actions_survive_encoding(conversations, encoder):
    """What the agent samples is decoded and must act as it was meant, also with unknown words."""
    actions = {m["content"] for talk in conversations for m in talk if m["role"] == "assistant"}
    for action in actions | {"search[zanzibar 99.75 mug]", "click[< Prev]", "click[Next >]"}:
        assert encoder.decode(encoder.reply(action)) == action


def test_a_known_word_is_one_token_and_none_is_unknown(encoder):
    assert len(encoder.reply("click[Buy Now]")) == len(["click", "[", "Buy", "Now", "]", "end"])
    tokens = pretrain.make_tokenizer(["list the doctors", "doctor_info"]).tokenize
    assert tokens("doctors doctor doctor_info") == [
        "doctor", "##s", "doctor", "doctor", "_", "info"]
    for text in ("a page with Words never seen: ~!@#$%^&*()_+{}\\/'\"", "SELECT * FROM t"):
        assert encoder.tokenizer.unk_token_id not in encoder.observation(text)


def test_the_shipped_model_is_small_and_copies_what_it_reads():
    folder = models.MODELS["tiny"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000
    model = models.read_model(folder)
    assert pretrain.copy_loss(model, 6, 64) < 0.5 and pretrain.copy_loss(model, 60, 16) < 0.1
