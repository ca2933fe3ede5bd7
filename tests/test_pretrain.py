"""Pretraining of the tiny model, on a recipe of seconds, and what the shipped one is."""

import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import dpo
from lab.pretrain import pretrain
from lab.pretrain.practice import Words, exchange, pattern
from lab.pretrain.recipes import intercodesql, scienceworld, webshop
from worlds.intercodesql.questions import HELD_OUT
from worlds.scienceworld import world
from worlds.webshop import catalogue

SMALL = {"webshop": (8, 1), "intercodesql": (8, 2)}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_recipe_makes_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "answers", lambda *_, fresh: (1, 0.5, 1.0))
    monkeypatch.setattr(pretrain, "copy_loss", lambda *_: 0.5)
    for name in ("first", "again"):
        pretrain.make(tmp_path / name, SMALL, copy_batches=1)
    assert contents(tmp_path / "first") == contents(tmp_path / "again")
    model = dpo.read_model(tmp_path / "first")
    tokenizer = dpo.read(AutoTokenizer, tmp_path / "first")
    assert model.config.vocab_size == len(tokenizer)
    assert "8 of webshop" in (tmp_path / "first" / "README.md").read_text()


def test_a_word_is_exchanged_alike_in_all_of_a_conversation():
    kinds = [Words(("car", "boat"), ("crow", "fox"), ("gnu",))]
    talk = [{"role": "user", "content": "how many cars? boats, carts, Car"},
            {"role": "assistant", "content": "DESC car_info; car_id; scar"}]
    [asked, said] = [m["content"] for m in exchange(random.Random(0), talk, kinds)]
    car, boat = ("crow", "fox") if "crow_info" in said else ("fox", "crow")
    assert asked == f"how many {car}s? {boat}s, carts, Car"
    assert said == f"DESC {car}_info; {car}_id; scar"
    # There is one fresh word, so the other one stays.
    asked = exchange(random.Random(0), talk, kinds, fresh=True)[0]["content"]
    assert asked == "how many cars? gnus, carts, Car"


@pytest.mark.parametrize("source", [webshop, intercodesql])
def test_fresh_words_are_in_no_text(source):
    kinds = source.exchanged()
    text = " ".join(m["content"] for c in source.conversations(0, 60)
                    for m in exchange(random.Random(0), c, kinds))
    for kind in kinds:
        assert pattern(kind.pool).search(text) and not pattern(kind.fresh).search(text)
        assert not {*kind.fresh} & {*kind.words, *kind.pool}


def test_shoppers_know_no_goal_of_a_split_and_open_no_product_that_is_held_out():
    shop, conversations = catalogue.shop_world(), webshop.conversations(0, 400)
    first = " ".join(c[0]["content"] for c in conversations)
    assert not any(goal["instruction"] in first for split in shop.goals.values() for goal in split)
    assert conversations[:50] == webshop.conversations(0, 50) != webshop.conversations(1, 50)
    actions = [m["content"] for talk in conversations for m in talk[1::2]]
    assert "click[Search]" in actions and len({*map(len, conversations)}) > 3  # they make mistakes
    opened = {*re.findall(r"click\[(B0\w{8})\]", " ".join(actions))}
    there = {p["asin"] for p in shop.products if not p["held_out"]}
    assert opened <= there and len(opened) > 0.7 * len(there)


def test_nobody_asks_the_databases_about_what_is_held_out():
    talks, held_out = intercodesql.conversations(0, 200), pattern(tuple(HELD_OUT))
    said = [m["content"] for talk in talks for m in talk[1::2]]
    asked = [talk[0]["content"] for talk in talks] + [q for q in said if q.startswith("SELECT")]
    assert not any(map(held_out.search, asked))
    assert any(map(held_out.search, said))  # but they are described


def test_wanderers_are_the_same_side_by_side(monkeypatch):
    monkeypatch.setattr(world._Simulator, "options",  # a short life repays no second compiler
                        [*world._Simulator.options, "-XX:TieredStopAtLevel=1"])
    talks, env = scienceworld.conversations(0, 4), world.ScienceWorld("short", "short")
    assert talks[1] == scienceworld.wanderer(env, 0, 1)
    env.close()
    assert len({str(talk) for talk in talks}) == 4


@pytest.fixture(scope="module")
def conversations():
    return webshop.conversations(0, 300)


@pytest.fixture(scope="module")
def encoder(conversations):
    return dpo.Encoder(pretrain.make_tokenizer([m["content"] for c in conversations for m in c]))


def test_actions_survive_encoding(conversations, encoder):
    """What the agent samples is decoded and must act as it was meant, also with unknown words."""
    actions = {m["content"] for c in conversations for m in c if m["role"] == "assistant"}
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
    folder = Path(dpo.__file__).parent / "tiny"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000
    model = dpo.read_model(folder)
    assert pretrain.copy_loss(model, 6, 64) < 0.5 and pretrain.copy_loss(model, 60, 16) < 0.1
