"""The pages and rules that the built-in WebShop and a real WebShop server share."""

from dataclasses import dataclass

from envs import Environment, Step

PROMPT = """\
You are shopping on a web shop. Find and buy a product that fits the instruction: its kind, its \
attributes, its options and its price.

Each turn you read the current page. Its parts are separated by [SEP]. Answer with a thought and \
one action:
Thought: why you do it
Action: the action

There are two actions:
search[words] - look for products; only on the search page
click[text] - press a button, open a product by its number, or choose an option; the text must \
be on the page

Choose the wanted options before click[Buy Now], which ends the episode. You have 10 turns. \
An action that the page does not offer does nothing and uses up a turn."""

DONE = ["Thank you for shopping with us!", "Your code:"]


@dataclass(frozen=True)
class Page:
    kind: str            # search | results | item | sub-page | done
    pieces: list[str]    # the visible texts
    links: dict          # {text of a button, product or option in lower case: target of the link}
    item: object = None  # product of an item page, sub-page or purchase; unused on other pages
    reward: float = 0.0  # reward of the purchase if `kind` is "done", otherwise 0
    options: tuple = ()  # chosen options as (name, value); always empty with a real server


class Shop(Environment):
    """The base class of the built-in WebShop and of the client for a real server.

    Texts and rules are the same as in WebShop's official text environment, with two exceptions.
    First, a search is valid only on the search page. Second, the page after a purchase ends at
    "Your code:", because the official page shows the goal and the reward after this text.

    The short view is for a very small model. Results pages, item pages and sub-pages omit the
    instruction and "Back to Search" in this view, although the agent can still click on "Back to
    Search". If the same page was shown before in the episode, the short view shows only the first
    piece of the page and "(seen)".

    A subclass defines the method follow(link, query), which returns the new `Page`. If the link is
    None, the method runs a search with the query.
    """
    name = "webshop"
    rules = PROMPT
    max_turns = 10
    searches_everywhere = False  # True if a search is valid on every page, as in ETO's code

    def step(self, reply: str) -> Step:
        name, argument = name_and_argument(self.action(reply))
        page = self.page
        if name == "search" and (page.kind == "search" or self.searches_everywhere):
            page = self.follow(None, argument)
        elif name == "click" and argument in page.links:
            page = self.follow(page.links[argument])
        idle = page == self.page
        return Step(self.show(page), page.reward, page.kind == "done", idle=idle)

    def show(self, page: Page, first: bool = False) -> str:
        """Makes a page the current page, and returns its text in the environment's view."""
        self.page = page
        if first:
            self.shown_before = set()  # the pages that the short view has shown in this episode
        if self.view == "full":
            return " [SEP] ".join(page.pieces)

        # The first three pieces are "Instruction:", the instruction and "Back to Search".
        pieces = page.pieces
        if page.kind not in ("search", "done"):
            pieces = pieces[3:]
        text = " | ".join(pieces)
        key = page.kind, page.item, text
        if key in self.shown_before:
            return f"{pieces[0]} (seen)"
        self.shown_before.add(key)
        return text

    def possible(self) -> tuple[list[str], str]:
        clicks = [f"click[{text}]" for text in self.page.links]
        forms = "search[words]" if self.page.kind == "search" else ""
        return clicks, forms


def name_and_argument(action: str) -> tuple[str, str]:
    r"""Returns the name of an action, and its argument in lower case.

    For example, the action "search[Red mug] now" gives ("search", "red mug"). A text that is not an
    action gives ("", ""). The result is that of WebShop's regular expression `(.+)\[(.+)\]`, but
    without its quadratic time.
    """
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1:end].lower()) if start > 0 else ("", "")
