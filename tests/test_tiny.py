"""The tiny model's tokenizer; that it is an ordinary folder is shown by every whole run."""

import random

import pytest

import dpo
from harness import tiny
from worlds.webshop.shop import WebShop


@pytest.fixture(scope="module")
def shop():
    return WebShop("short")


@pytest.fixture(scope="module")
def conversations(shop):
    return shop.practice(0, 300, None)


@pytest.fixture(scope="module")
def encoder(conversations):
    return dpo.Encoder(tiny.make_tokenizer([m["content"] for c in conversations for m in c]))


def test_actions_survive_encoding(shop, conversations, encoder):
    """What the agent samples is decoded and must act as it was meant, also with unknown words."""
    actions = {m["content"] for c in conversations for m in c if m["role"] == "assistant"}
    for action in actions | {"search[zanzibar 99.75 mug]", "click[< Prev]", "click[Next >]"}:
        assert encoder.decode(encoder.reply(action)) == action


def test_a_known_word_is_one_token(encoder):
    assert len(encoder.reply("click[Buy Now]")) == len(["click", "[", "Buy", "Now", "]", "end"])
    page = "Page 1 | B0AAAAAAAA | $36.0"
    assert len(encoder.observation(page)) > len(page.split())  # an unknown ASIN is spelled out


def test_nothing_is_unknown(encoder):
    unknown = encoder.tokenizer.unk_token_id
    for text in ("a page with Words never seen: ~!@#$%^&*()_+{}\\/'\"", "SELECT * FROM t"):
        assert unknown not in encoder.observation(text)


def test_copies_train_on_what_was_said_before():
    recipe = dict(copy_tokens=(3, 12), copy_times=4)
    [sequence] = tiny.copy_group(random.Random(1), 50, recipe).sequences
    n = len(sequence.ids) // 4
    assert 3 <= n <= 12 and sequence.ids == sequence.ids[:n] * 4
    assert sequence.action_mask == [0] * n + [1] * 3 * n
