"""The built-in WebShop: reward, pages, actions, tasks and expert."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import DATA, ROOT, table

import envs
from environments.webshop import catalogue
from environments.webshop import shop as webshop
from environments.webshop.shop import WebShop


def test_reward_agrees_with_the_official_reward_on_all_vectors():
    vectors = json.loads((DATA / "webshop/reward_vectors.json").read_text(encoding="utf-8"))
    assert len(vectors) == 200
    for v in vectors:
        got = webshop.webshop_reward(v["product"], v["goal"], v["options"], v["price"])
        assert got == pytest.approx(v["reward"], abs=1e-12), v


def test_texts_are_compared_by_words_without_the_characters_128_to_255():
    assert webshop.token_set_ratio("caf\u00e9", "caf") == 100
    assert webshop.token_set_ratio("!!", "!!") == 0


CATEGORY = "Home › Kitchen › Kettles"
KETTLE = {"name": "Enamel Kettle", "Title": "Enamel Kettle", "query": "kettle",
          "product_category": CATEGORY, "Attributes": ["easy clean"],
          "BulletPoints": ["Stays cool"], "Description": "Drip free."}
WANT = {"name": "Enamel Kettle", "query": "kettle", "price_upper": 30.0,
        "product_category": CATEGORY, "instruction": "i need a kettle",
        "attributes": ["easy clean", "drip free"], "goal_options": ["navy", "large"]}


SMALL = catalogue.ShopData(
    products=[
        {**KETTLE, "asin": "B0AAAAAAAA", "price": 36.0, "Attributes": ["easy clean", "bpa free"],
         "BulletPoints": ["one", "two"], "options": {"color": ["navy", "sand"], "size": ["large"]}},
        {**KETTLE, "asin": "B0BBBBBBBB", "Title": "Copper Kettle", "price": 20.5, "options": {}},
        {**KETTLE, "asin": "B0CCCCCCCC", "Title": "Kettle", "price": 9.0, "options": {},
         "BulletPoints": []}],
    goals={"train": [WANT], "test": []})
HEAD = "Instruction: [SEP] i need a kettle [SEP] Back to Search [SEP] "
SEARCH = "WebShop [SEP] Instruction: [SEP] i need a kettle [SEP] Search"
PAGE_1 = HEAD + ("Page 1 (Total results: 3) [SEP] Next > [SEP] B0CCCCCCCC [SEP] Kettle [SEP] $9.0 "
                 "[SEP] B0AAAAAAAA [SEP] Enamel Kettle [SEP] $36.0")
PAGE_2 = HEAD + ("Page 2 (Total results: 3) [SEP] < Prev [SEP] Next > [SEP] B0BBBBBBBB [SEP] "
                 "Copper Kettle [SEP] $20.5")
PAGE_3 = HEAD + "Page 3 (Total results: 3) [SEP] < Prev [SEP] Next >"
ITEM = HEAD + ("< Prev [SEP] color [SEP] navy [SEP] sand [SEP] size [SEP] large [SEP] "
               "Enamel Kettle [SEP] Price: $36.0 [SEP] Rating: N.A. [SEP] Description [SEP] "
               "Features [SEP] Reviews [SEP] Attributes [SEP] Buy Now")
DONE = "Thank you for shopping with us! [SEP] Your code:"


def small_shop(actions="", view="full", data=SMALL):
    """Returns a shop of three kettles, two on a page, after some actions, and their steps."""
    shop = WebShop(view, data)
    shop.page_size = 2
    shop.reset("webshop-train-0")
    return shop, [shop.step(action) for action in actions.split("; ") if action]


OPEN = "search[kettle]; click[B0AAAAAAAA]"


@pytest.mark.parametrize("actions, text", table(f"""
    search[KETTLE] -> {PAGE_1}
    search[teapot] -> {HEAD}Page 1 (Total results: 0) [SEP] Next >
    search[kettle]; click[Next >]; click[next >] -> {PAGE_3}
    search[kettle]; click[Next >]; click[< Prev] -> {PAGE_1}
    search[kettle]; click[Back to Search] -> {SEARCH}
    {OPEN}; click[navy]; click[Large] -> {ITEM}
    search[kettle]; click[Next >]; click[b0bbbbbbbb]; click[< Prev] -> {PAGE_2}
    {OPEN}; click[Description] -> {HEAD}< Prev [SEP] Drip free.
    {OPEN}; click[Features] -> {HEAD}< Prev [SEP] one [SEP] two
    {OPEN}; click[Reviews] -> {HEAD}< Prev
    {OPEN}; click[Attributes] -> {HEAD}< Prev [SEP] easy clean [SEP] bpa free [SEP] Home [SEP] kettle [SEP] {CATEGORY}
    {OPEN}; click[Reviews]; click[< Prev] -> {ITEM}
    {OPEN}; click[Buy Now] -> {DONE}
"""))
def test_text_of_every_kind_of_page(actions, text):
    """Page 3 is past the end. Chosen options are not shown. Attributes are as on the official page.
    """
    assert small_shop(actions)[1][-1].observation == text


def test_of_options_that_share_a_value_the_last_is_chosen():
    """By the official rule: a dictionary of values, in which later options replace earlier ones."""
    product = SMALL.products[0] | {"options": {"color": ["navy", "large"], "size": ["large"]}}
    _, steps = small_shop(f"{OPEN}; click[large]; click[navy]; click[Buy Now]",
                          data=replace(SMALL, products=[product]))
    assert steps[-1].reward == 4 / 5  # 2 attributes, navy and large


@pytest.mark.parametrize("before, action, why", table(f"""
    -> click[Search] -> it is not a button to click
    -> Search[kettle] -> names are case-sensitive
    -> search[] -> no words
    -> Thought: search[kettle] Action: look around -> another action
    -> search[a] and click[b] -> the name runs up to the last bracket
    search[kettle] -> search[copper] -> search belongs to the search page
    search[kettle] -> click[B0BBBBBBBB] -> it is on the next page
    {OPEN} -> click[color] -> an option's name
    {OPEN}; click[navy] -> click[navy] -> again
"""))
def test_an_invalid_action_keeps_the_page_and_the_reward(before, action, why):
    shop, _ = small_shop(before)
    page = " [SEP] ".join(shop.page.pieces)
    step = shop.step(action)
    assert step == envs.Step(page, 0.0, False) and step.idle, why


@pytest.mark.parametrize("clicks, points", table("""
    click[Buy Now] -> 2
    click[navy]; click[Buy Now] -> 3
    click[navy]; click[large]; click[Buy Now] -> 4
    click[navy]; click[sand]; click[large]; click[Buy Now] -> 3
    click[navy]; click[Description]; click[< Prev]; click[Buy Now] -> 3
    click[navy]; click[< Prev]; click[B0AAAAAAAA]; click[Buy Now] -> 2
"""))
def test_a_purchase_ends_the_episode_with_the_reward_of_the_chosen_options(clicks, points):
    """2 attributes have 2 of 5 points, navy and large 2 more. The price of 36 is above 30. Options
    survive a sub-page, and are lost on the way to the results."""
    _, steps = small_shop(f"{OPEN}; {clicks}")
    assert steps[-1] == envs.Step(DONE, pytest.approx(int(points) / 5), True)
    assert not any(step.idle for step in steps)


def test_a_search_gives_at_most_fifty_results():
    shop = WebShop()
    shop.reset("webshop-train-0")
    text = shop.step(f"search[{' '.join(catalogue.TYPES)}]").observation
    assert "Page 1 (Total results: 50)" in text
    for _ in range(12):  # four on a page
        text = shop.step("click[Next >]").observation
    assert len(catalogue.read_results(text)) == 2


def test_search_ranks_by_bm25():
    # 3 texts of mean length 2; "b" is in two: idf = ln(1 + 1.5 / 2.5), "c" in one: ln(1 + 2.5/1.5).
    # Text 1 (length 3): b 0.470 / (1 + 0.9 (0.6 + 0.4 * 3/2)) = 0.226, c 0.981 / 2.08 = 0.472;
    # text 2 (length 1): b 0.470 / (1 + 0.9 (0.6 + 0.4 / 2)) = 0.273.
    rank = webshop.BM25(["A d", "a b c", "b"])
    assert rank("B") == [2, 1] and rank("b c") == [1, 2] and rank("x") == []


def test_the_short_view_leaves_out_what_was_shown_before():
    shop, _ = small_shop(view="short")
    assert shop.prompt == "" and shop.reset("webshop-train-0") == "WebShop | Instruction: | i need a kettle | Search"
    for action, text in table(f"""
            search[kettle] -> {PAGE_1}
            search[kettle] -> Page 1 (Total results: 3) (seen)
            click[B0AAAAAAAA] -> {ITEM}
            click[navy] -> < Prev (seen)
            click[< Prev] -> Page 1 (Total results: 3) (seen)
            click[Back to Search] -> WebShop (seen)"""):
        assert shop.step(action).observation == text.removeprefix(HEAD).replace("[SEP]", "|")


def test_catalogue_is_built_of_near_twins():
    """Of the four twins of a goal, one meets it. The others are too dear, lack its colour, or both."""
    data = catalogue.shop_data()
    assert len({p["asin"] for p in data.products}) == 384
    for goal in sum(data.goals.values(), []):
        limit, (colour, *_) = goal["price_upper"], goal["goal_options"]
        twins = {(p["price"] <= limit, colour in p["options"]["color"]): p
                 for p in data.products if p["Title"] == goal["name"]}
        assert len(twins) == 4 and best_purchase(twins[True, True], goal) == 1
        assert goal["instruction"].endswith(f", and price lower than {limit:.2f} dollars")


def test_no_two_options_or_attributes_count_as_equal():
    """Otherwise a wrong click would pay."""
    products = catalogue.shop_data().products
    options = {webshop.normalise_colour(value) for p in products for value in sum(p["options"].values(), [])}
    attributes = {attribute for p in products for attribute in p["Attributes"]}
    for a, b in [*itertools.combinations(options, 2), *itertools.combinations(attributes, 2)]:
        assert webshop.token_set_ratio(a, b) <= 85, (a, b)


def best_purchase(product, goal):
    """The most that buying the product can earn, over all choices of its options."""
    choices = [[None, *values] for values in product["options"].values()]
    return max(webshop.webshop_reward(
        product, goal, {name: value for name, value in zip(product["options"], chosen) if value},
        product["price"], nouns=catalogue.type_words)
        for chosen in itertools.product(*choices))


def test_unseen_shares_no_product_with_the_other_splits():
    """By brute force over products and options, all products that meet a goal are on its side."""
    data = catalogue.shop_data()
    assert len({goal["instruction"] for goals in data.goals.values() for goal in goals}) == 1152
    for split, goals in data.goals.items():
        for goal in goals[::10]:
            kind = [p for p in data.products if p["query"] == goal["query"]]
            meeting = [p for p in kind if best_purchase(p, goal) == 1]
            assert meeting == [p for p in data.products if catalogue.meets(p, goal)] != []
            assert {p["held_out"] for p in meeting} == {split == "unseen"}
            assert not any(best_purchase(p, goal) for p in data.products[::32] if p not in kind)


def test_the_generated_data_are_the_same_in_every_process():
    code = ("import hashlib, json; from environments.webshop.catalogue import shop_data; "
            "from environments.intercodesql.questions import sql_data; a, b = shop_data(), sql_data(); "
            "made = json.dumps([a.products, a.goals, b.databases, b.questions]); "
            "print(hashlib.sha256(made.encode()).hexdigest())")
    seen = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, check=True, capture_output=True,
                           env={"PYTHONHASHSEED": seed}).stdout for seed in ("0", "1")}
    assert len(seen) == 1


def test_goals_have_one_key_if_every_purchase_earns_the_same():
    """The key does not depend on words, order, or limits with no price in between."""
    shop = WebShop()
    generator = shop.task_generator()
    for goal in map(shop.find, (shop.tasks("train") + shop.tasks("test"))[::60]):
        limit, attributes, options = goal["price_upper"], goal["attributes"], goal["goal_options"]
        changes = [dict(instruction="in other words"), dict(attributes=attributes[::-1]),
                   dict(goal_options=options[::-1]), dict(goal_options=options[:1]),
                   dict(attributes=[*attributes, "nothing has this"])]
        changes += [dict(price_upper=limit + more) for more in (0.5, -0.5, 1, 3, 10, 40)]
        kind = [p for p in generator.products if p["query"] == goal["query"]]
        for other in (goal | change for change in changes):
            same = all(best_purchase(p, other) == best_purchase(p, goal) for p in kind)
            assert (generator.key(other) == generator.key(goal)) == same
            assert not same or generator.refusal(other) == "a goal of a split"
