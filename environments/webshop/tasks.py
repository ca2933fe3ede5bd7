"""New goals for the embedded shop, which ask for what somebody bought there: what was bought by
mistake is right for the new goal, and the episode's own actions are its solution."""

import random
import re
import unicodedata
from dataclasses import dataclass

from environments import words_of
from environments.webshop.catalogue import goal_for, goal_key, instruction_of, meets
from environments.webshop.shop import Page, name_and_argument
from environments.wording import with_pairs

FITS_MOST = 4  # products that may meet a goal, else it asks for nothing in particular [ours]


@dataclass(frozen=True)
class Done:
    """An action that the shop carried out."""
    reply: str  # which says it
    kind: str   # what it did, in words
    page: Page  # after it


class TaskGenerator:
    # What an explorer model is told about the tasks that it writes.
    form = ("A task is what a customer wants to buy: a kind of product, one or two attributes, the "
            "options and a price limit, in the words of the shop's pages and of the instruction; "
            "the limit as: lower than 50.00 dollars. Its actions end with the purchase.")
    # And about those that it plays, where the rules are not said.
    actions = "search[words] on the search page, click[text] with a text of the page elsewhere"

    def __init__(self, shop):
        self.shop = shop
        self.products = shop.data.products
        self.attributes = {text for product in self.products for text in product["Attributes"]}
        self.options = set()
        for product in self.products:
            self.options.update(*product["options"].values())

        self.said = set()       # what goals of the splits say
        self.known = set()      # the keys of training goals
        self.evaluated = set()  # of others what they ask for, at whatever price
        for split, goals in shop.data.goals.items():
            self.said |= {words_of(goal["instruction"]) for goal in goals}
            if split == "train":
                self.known |= {self.key(goal) for goal in goals}
            else:
                self.evaluated |= {goal_key(goal)[:-1] for goal in goals}

    # ------------------------------------------------------------------ what episodes become

    def patterns(self, task: str, replies: list[str]) -> set[str]:
        """Kinds of the actions that the shop carried out, and of two in a row."""
        kinds = [done.kind for done in self._carried_out(self.shop.find(task), replies)]
        return with_pairs(kinds)

    def finds(self, task: str, replies: list[str], rng: random.Random) -> list[dict]:
        """Proposals {text, task, solution} from an episode: none, or the one of its purchase."""
        bought = self._bought(task, replies)
        if bought is None:
            return []
        product, chosen, actions = bought
        attributes = rng.sample(product["Attributes"], rng.choice([1, 2]))
        goal = goal_for(rng, product, attributes, chosen)
        goal["instruction"] = instruction_of(rng, goal)
        return [dict(text=goal["instruction"], task=goal, solution=actions)]

    def written(self, task: str, proposal: dict) -> dict | None:
        """An explorer model's words, and the goal that they come to with its purchase, or None."""
        text = proposal["query"]
        limits = re.findall(r"(?:than|under|below|\$)\s*\$?(\d+(?:\.\d+)?)", text.lower())
        bought = self._bought(task, proposal["action_sequence"])
        if bought is None or len(limits) != 1:
            return None
        product, chosen, _ = bought
        limit = float(limits[0])
        kinds, rest = named(text, [product["query"]])
        attributes, rest = named(rest, self.attributes)
        options, _ = named(rest.replace(f" {words_of(limits[0])} ", " | "), self.options)
        if not kinds or not attributes or limit <= product["price"]:
            return None
        if not {*attributes} <= {*product["Attributes"]} or not {*options} <= {*chosen}:
            return None
        goal = dict(name=product["Title"], query=product["query"],
                    product_category=product["product_category"], attributes=attributes,
                    goal_options=[value for value in chosen if value in options],
                    price_upper=limit, instruction=text)
        return dict(text=text, task=goal, solution=proposal["action_sequence"])

    def _bought(self, task: str, replies: list[str]) -> tuple[dict, list[str], list[str]] | None:
        """What an episode ends with: product, options (colour first), the actions carried out."""
        done = self._carried_out(self.shop.find(task), replies)
        if not done or done[-1].page.kind != "done":
            return None
        end = done[-1].page
        colour = dict(end.options).get("color")
        chosen = sorted((value for _, value in end.options), key=lambda value: value != colour)
        return self.products[end.item], chosen, [each.reply for each in done]

    # ------------------------------------------------------------------ what may join

    def key(self, goal: dict) -> tuple:
        """What a goal asks for. Of one key are goals under which each purchase earns the same: of
        limits it counts which products of the kind they allow."""
        allowed = 0
        for product in self.products:
            allowed += (product["query"] == goal["query"]
                        and product["price"] <= goal["price_upper"])
        return *goal_key(goal)[:-1], allowed

    def tells(self, text: str, solution: list[str]) -> bool:
        """Whether a text says what to do, in whatever spelling: search[...] or click[...], a
        product's number, Buy Now. A customer knows none of these."""
        plain = unicodedata.normalize("NFKC", text).lower()
        if re.search(r"search\s*[^\w\s,.;!?'-]", plain):
            return True
        told = ["click", "buy now", *map(self.shop.action, solution)]
        told += [product["asin"] for product in self.products]
        said = squeezed(plain)
        return any(squeezed(words.lower()) in said for words in told)

    def refusal(self, goal: dict) -> str | None:
        """Why no run may have this goal; None if one may."""
        if (self.key(goal) in self.known or goal_key(goal)[:-1] in self.evaluated
                or words_of(goal["instruction"]) in self.said):
            return "a goal of a split"
        fits = [product for product in self.products if meets(product, goal)]
        if not fits:
            return "no product meets it"
        if any(product["held_out"] for product in fits):
            return "a held-out product meets it"
        colours = set()
        for product in fits:
            colours.update(product["options"]["color"])
        if not colours & {*goal["goal_options"]}:
            return "no colour chosen"
        return f"more than {FITS_MOST} products meet it" if len(fits) > FITS_MOST else None

    def verify(self, proposal: dict) -> str | None:
        """Plays the solution under the new goal; why it does not prove it, or None. Once, since
        the shop has no state that a second time could find changed."""
        solution = proposal["solution"]
        if len(solution) > self.shop.max_turns:
            return "its solution is longer than an episode"
        done = self._carried_out(proposal["task"], solution)
        if [each.reply for each in done] != solution:
            return "an action of its solution is not carried out"
        reward = done[-1].page.reward if done else 0.0
        return None if reward == 1.0 else f"its solution earns {reward:.2f}"

    def _carried_out(self, goal: dict, replies: list[str]) -> list[Done]:
        """The actions of an episode on a goal that the shop carries out."""
        self.shop.start(goal)
        done = []
        for reply in replies:
            before = self.shop.page
            if before.kind == "done":
                break
            self.shop.step(reply)
            after = self.shop.page
            if after is not before:
                _, argument = name_and_argument(self.shop.action(reply))
                done.append(Done(reply, kind_of(argument, goal, before, after), after))
        return done


def kind_of(argument: str, goal: dict, before: Page, after: Page) -> str:
    """What an action did.

    Args:
        argument: What stands in its brackets.
        goal: Of the episode.
        before: The page on which it was done.
        after: The page that it led to.
    """
    if after.kind == "done":
        wanted = {*goal["goal_options"]}
        return "buy as asked" if wanted <= {value for _, value in after.options} else (
            "buy without an option")
    if before.kind == "search":
        told = sum(attribute in argument for attribute in goal["attributes"])
        other = "" if goal["query"] in argument else " of another type"
        return f"search for {told} attributes{other}"
    if before.kind == "results" and after.kind == "item":
        opened = [text for text in before.links if re.fullmatch("b0[a-z0-9]{8}", text)]
        return f"open number {opened.index(argument) + 1}"
    if before.kind == after.kind == "item":
        asked = argument in goal["goal_options"]
        return "choose what was asked" if asked else "choose something else"
    return argument


def named(text: str, phrases) -> tuple[list[str], str]:
    """The phrases that stand in a text, of two that overlap the longer; the text without them."""
    text = re.sub(r"[^a-z0-9|]+", " ", f" {text.lower()} ")
    found = []
    for phrase in sorted(phrases, key=lambda phrase: (-len(phrase), phrase)):
        words = f" {words_of(phrase)} "
        if words in text:
            found.append(phrase)
            text = text.replace(words, " | ")
    return found, text


def squeezed(text: str) -> str:
    """A text's letters and digits alone."""
    return re.sub(r"[\W_]+", "", text)
