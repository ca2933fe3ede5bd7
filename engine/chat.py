"""Encodes multi-turn conversations as token ids and action masks, using a chat template.

A conversation starts with an opening: the messages before the agent's first reply. After the
opening, replies of the agent and observations of the environment alternate. `Encoder` encodes each
of these pieces separately. `Template` splits the tokenizer's chat template into the text before and
after each message.
"""

import hashlib
import re
from dataclasses import replace
from datetime import datetime

from common.settings import UsageError
from dpo import Ids, Trajectory
from engine.sampling import Sampler


class Encoder:
    """Encodes a conversation piece by piece: opening, reply, observation, reply, and so on.

    The token ids that an agent sampled are kept unchanged. If they were decoded and the text was
    tokenised again, the new ids could be different.

    The action mask is 1 for the tokens of replies, including their end-of-turn tokens, and 0 for
    all other tokens. If an agent did not write an end-of-turn token, this token is appended with an
    action mask of 0.

    The generation prompt of the template, such as "<|im_start|>assistant", belongs to the opening
    or observation before a reply. If the template writes further text before a reply, such as the
    space in Llama 2, this text belongs to the reply.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        vocabulary_size: The number of rows in the model's embedding matrix. The default is the
            tokenizer's largest token id plus 1.

    Raises:
        UsageError: The tokenizer cannot be used. For example, `encode` fails for a test
            conversation.
    """

    def __init__(self, tokenizer, vocabulary_size: int | None = None):
        self.tokenizer = tokenizer
        all_ids = tokenizer.get_vocab().values()  # ids below the largest id may be unused
        self.vocabulary_size = vocabulary_size or max(all_ids) + 1
        self.valid_ids = {i for i in all_ids if i < self.vocabulary_size}
        self.template = Template(tokenizer)
        self.special_tokens = self.template.special_tokens
        # The texts that a message must not contain: special tokens, and their normalised forms,
        # because some tokenizers normalise a text, for example to lower case, before they search
        # for special tokens.
        normalised = map(self.template.normalised, self.special_tokens)
        self.forgeries = sorted({*self.special_tokens, *normalised} - {""})
        self.end_of_turn = tokenizer.convert_tokens_to_ids(self.template.end_token)
        messages = hard_conversation()
        for count in range(len(messages)):
            self.encode(messages[:count + 1], opening=1)

    # Methods that encode a piece of a conversation

    def start(self, messages: list[dict]) -> Ids:
        """Returns the token ids of the opening, including the first generation prompt."""
        return self.tokenise(self.render(messages, add_generation_prompt=True))

    def reply(self, text: str) -> Ids:
        """Returns the token ids of a reply, including its end-of-turn token."""
        content = self.plain(text, is_reply=True)
        piece = self.template.before_reply + content + self.template.after_reply
        return self.ids_after(self.template.opening, piece)

    def observation(self, text: str) -> Ids:
        """Returns the token ids between the end-of-turn token of a reply and the next reply."""
        template = self.template
        piece = template.before_observation + self.plain(text) + template.after_observation
        return self.ids_after(template.end_token, piece)

    def plain(self, text: str, is_reply: bool = False) -> str:
        """Cleans the text of a message: breaks up special tokens and strips outer whitespace.

        An observation with special tokens could end its own message, and start a forged message of
        a different role. A reply keeps its outer whitespace if the chat template keeps it.
        """
        if not isinstance(text, str):
            raise UsageError(f"the content of a message is {text!r:.60}, which is no text; fix the "
                             "source of the message")
        if text != text.encode(errors="replace").decode():
            raise UsageError(f"the content of a message is {text!r:.60}, which has a lone "
                             "surrogate; fix the source of the message")
        text = break_up(text, self.special_tokens)
        normal = self.template.normalised(text)
        if any(token in normal for token in self.forgeries):  # special tokens after normalisation
            text = break_up(normal, self.forgeries)
        return text if is_reply and self.template.keeps_whitespace else text.strip()

    def render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """Cleans the messages of a conversation, and renders them with the chat template."""
        plain_messages = []
        for message in messages:
            content = self.plain(message["content"], message["role"] == "assistant")
            plain_messages.append({**message, "content": content})
        return self.template.render(plain_messages, add_generation_prompt)

    def ids_after(self, context: str, text: str) -> Ids:
        """Returns the token ids of a text after a context. The context may affect these ids."""
        context_ids = self.tokenise(context)
        ids = self.tokenise(context + text)
        if ids[:len(context_ids)] != context_ids:
            self.template.refuse(f"the tokens of {context[-20:]!r} change with the text that "
                                 "follows; use another model")
        return ids[len(context_ids):]

    def tokenise(self, text: str) -> Ids:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        largest = max(ids, default=0)
        if largest >= self.vocabulary_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            self.template.refuse(
                f"its token {token!r} ({largest}) has no row in the model's embedding of "
                f"{self.vocabulary_size:,}; resize the embedding, or use the model's own tokenizer")
        return ids

    # Methods that encode or change whole replies, conversations and trajectories

    def encode(self, messages: list[dict], opening: int) -> tuple[Ids, Ids]:
        """Encodes a conversation piece by piece, and returns its token ids and action mask.

        Raises UsageError if the token ids differ from those of the whole conversation, rendered and
        tokenised at once.

        Args:
            messages: The messages of the conversation, each {role, content}.
            opening: The number of messages in the opening. The opening may contain replies, such as
                in-context examples, which get an action mask of 0.
        """
        for number, message in enumerate(messages, 1):
            if set(message) != {"role", "content"}:
                raise UsageError(f"message {number} has the fields {', '.join(message)}; give it "
                                 "role and content, and nothing else")
        # 1. Encode the conversation piece by piece.
        t = Trajectory()
        t.extend(self.start(messages[:opening]), is_action=False)
        for number, message in enumerate(messages[opening:], opening + 1):
            if message["role"] == "assistant":
                self.check_whitespace(message["content"], number)
                t.extend(self.reply(message["content"]), is_action=True)
            else:
                t.extend(self.observation(message["content"]), is_action=False)

        # 2. Render and tokenise the whole conversation at once, and compare the ids.
        ends_with_reply = messages[-1]["role"] == "assistant"
        expected = self.tokenise(self.render(messages, add_generation_prompt=not ends_with_reply))
        if ends_with_reply:
            # The template may write text after the last end-of-turn token, such as the line break
            # in ChatML. This text is not part of the reply, but of the next observation.
            expected = expected[:len(t.ids)]
        if expected != t.ids:
            roles = ", ".join(message["role"] for message in messages[:4])
            self.template.refuse(
                f"its chat template renders {len(messages)} messages ({roles} ...) at once "
                "differently from message by message; alternate user and assistant messages, and "
                "use an Instruct model that does not think and does not number or change messages")
        return t.ids, t.action_mask

    def check_whitespace(self, reply: str, number: int) -> None:
        """Raises UsageError if a reply starts with whitespace that the chat template removes."""
        if isinstance(reply, str) and reply[:1].isspace() and not self.template.keeps_whitespace:
            self.template.refuse(f"its chat template removes the whitespace that message {number} "
                                 "begins with; remove it from the message, or use another model")

    def decode(self, ids: Ids) -> str:
        """Decodes token ids to text, without end-of-turn tokens and without cleaning up spaces."""
        ids = [i for i in ids if i != self.end_of_turn]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def close(self, ids: Ids, stops: tuple[str, ...]) -> tuple[Ids, Ids, str]:
        """Cuts a sampled reply before its first stop string, and adds an end-of-turn token.

        Returns:
            The sampled ids up to the first stop string, the ids to append to them, and the text of
            the reply. The ids to append are an end-of-turn token, or an empty list if the agent
            sampled an end-of-turn token itself.
        """
        text = self.decode(ids)
        starts = [text.index(stop) for stop in stops if stop in text]
        if not starts:
            if ids[-1] == self.end_of_turn:
                return ids, [], text.strip()
            return ids, [self.end_of_turn], text.strip()

        wanted = text[:min(starts)]
        size = len(ids)
        while len(self.decode(ids[:size])) > len(wanted):
            size -= 1
        # One token may contain both the end of the reply and the start of the stop string. For
        # example, in "click[mug]\nObservation:", the token may be "]\n". Keep this token if its
        # characters from the stop string are only whitespace.
        reply = self.decode(ids[:size]).strip()
        longer = self.decode(ids[:size + 1]).strip()
        if reply != wanted.strip() and longer == wanted.strip():
            return ids[:size + 1], [self.end_of_turn], longer
        return ids[:size], [self.end_of_turn], reply

    def reply_ends(self, t: Trajectory) -> list[int]:
        """Returns the index in `t.ids` of each reply's end-of-turn token, (t.turns,).

        The trajectory has to end with a reply.
        """
        ends = []
        for position, token in enumerate(t.ids):
            if token == self.end_of_turn:
                ends.append(position)
        # In most templates, observations also contain an end-of-turn token. If so, every second
        # end-of-turn token, counted backwards from the last, ends a reply.
        stride = 1 + self.observation("").count(self.end_of_turn)
        last_first = ends[::-stride]
        return sorted(last_first[:t.turns])

    def cut(self, t: Trajectory, replies: int) -> Trajectory:
        """Returns a copy of the trajectory whose tokens end after its first `replies` replies.

        A trajectory without further replies is returned unchanged.
        """
        if replies >= t.turns:
            return t
        size = self.reply_ends(t)[replies - 1] + 1
        return replace(t, ids=t.ids[:size], action_mask=t.action_mask[:size], turns=replies,
                       ended="turn_limit")

    def without_ends(self, t: Trajectory) -> Trajectory:
        """Returns a copy of the trajectory that has an action mask of 0 for end-of-turn tokens.

        If the last reply ended the episode and was not the only reply, the action mask of the last
        reply is also 0. The DPO loss of a rejected trajectory then does not teach the agent to
        avoid ending its replies and episodes. If no action token is left, the trajectory is
        returned unchanged.
        """
        ends = self.reply_ends(t)
        mask = list(t.action_mask)
        for end in ends:
            mask[end] = 0
        if t.ended == "done" and len(ends) > 1:
            last_reply = ends[-2] + 1
            mask[last_reply:] = [0] * len(mask[last_reply:])
        return replace(t, action_mask=mask) if any(mask) else t

    def sampler(self, temperature: float = 1.0) -> Sampler:
        """Returns the `Sampler` that defines the distribution of an agent's tokens.

        Special tokens are suppressed, except for the end-of-turn token. Ids that belong to no token
        are also suppressed, because the embedding matrix may have more rows than the vocabulary.
        """
        special_ids = self.tokenizer.convert_tokens_to_ids(self.special_tokens)
        allowed = self.valid_ids - set(special_ids) | {self.end_of_turn}
        suppressed = set(range(self.vocabulary_size)) - allowed
        return Sampler(temperature, tuple(sorted(suppressed)), self.vocabulary_size)

    def fingerprint(self) -> str:
        """Returns a hash of the chat template, the special tokens and the tokenizer.

        Two encoders with the same fingerprint encode every conversation to the same ids.
        """
        tokenizer = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:
            tokenizer = self.tokenizer.backend_tokenizer.to_str()
        state = repr([self.template.text, self.special_tokens, tokenizer])
        return hashlib.sha256(state.encode()).hexdigest()[:16]


def break_up(text: str, tokens: list[str]) -> str:
    """Changes special tokens in a text, so that they are tokenised as ordinary text.

    For example, "<|im_end|>" becomes "< |im_end|>". A token of a single character is replaced with
    its code point, such as "U+2581".
    """
    for token in tokens:
        if len(token) == 1:
            text = text.replace(token, f"U+{ord(token):04X}")
        else:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def hard_conversation() -> list[dict]:
    """Returns twelve messages that test whether a chat template changes the messages it renders.

    Some templates add numbers to messages, remove reasoning (<think>), escape quotes and brackets,
    remove repeated spaces and empty lines, or shorten long texts.
    """
    messages = []
    for n in range(6):
        for role in ["user", "assistant"]:
            content = (f"<think>a {n}</think> It's [{n}] & <b>\"c\"</b>, {{'d': \"e\"}}\n\n\n"
                       f"f  g\n\n```h```\n{'long text ' * 20}{role} {n}.")
            messages.append(dict(role=role, content=content))
    return messages


# Some templates write today's date into the prompt. It is replaced with this date, the default in
# Llama 3's template, because agents should get the same prompt during and after training.
DATE = datetime(2024, 7, 26)
TODAY = re.compile(r"""strftime_now\s*\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")


class Template:
    r"""The chat template of a tokenizer, split into the text before and after each message.

    For example, ChatML renders a conversation as follows, where \n is a line break. The messages
    are "buy a mug", "click[mug]" and "Bought.". Other templates, such as Llama 2's, have different
    text between the messages:

        <|im_start|>user\nbuy a mug<|im_end|>\n<|im_start|>assistant\n       the opening
        click[mug]<|im_end|>                                               a reply
        \n<|im_start|>user\nBought.<|im_end|>\n<|im_start|>assistant\n        an observation

    Raises UsageError if the tokenizer has no chat template, or the template cannot be split in this
    way.
    """

    # The comments show the values in the ChatML example above.
    before_reply: str        # the text before a reply: empty in ChatML, and a space in Llama 2
    after_reply: str         # <|im_end|>
    before_observation: str  # \n<|im_start|>user\n
    after_observation: str   # <|im_end|>\n<|im_start|>assistant\n, with generation prompt
    end_token: str           # <|im_end|>, the end-of-turn token of a reply
    opening: str             # example of a rendered prompt with the single message "CONTENT"
    keeps_whitespace: bool   # True if the template keeps the outer whitespace of replies
    special_tokens: list[str]  # the tokenizer's special tokens, and the template's turn markers

    def __init__(self, tokenizer):
        # 1. Find the template.
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            self.refuse("it has no chat template; use a chat model")
        try:
            self.text = tokenizer.get_chat_template()
        except ValueError:
            self.refuse("none of its chat templates is called default: "
                        f"{', '.join(tokenizer.chat_template)}; save it with only one template")
        self.text = TODAY.sub(lambda call: call[1] + DATE.strftime(call[2]) + call[1], self.text)
        if re.search(r"(?<!macro )strftime_now\s*\(", self.text):
            self.refuse("its chat template calls strftime_now with a variable, so its prompts "
                        "would change every day; write the format into the call")

        # 2. Render conversations in which every message is the word CONTENT, and split the rendered
        # text at these words.
        mark = "CONTENT"
        while mark in self.text:
            mark += "X"
        user = dict(role="user", content=mark)
        assistant = dict(role="assistant", content=mark)
        pieces = self.render([user, assistant, user], add_generation_prompt=True).split(mark)
        closing = self.render([user, assistant], add_generation_prompt=False).split(mark)[-1]
        changes = ("its chat template changes a message once it is answered; use an Instruct model "
                   "that does not think")
        # Three messages split the text into four pieces: before, between and after the messages.
        if len(pieces) != 4:
            self.refuse(changes)
        special_tokens = self.special_tokens_in("".join([*pieces, closing]))
        self.special_tokens = sorted(special_tokens)
        spaced = dict(role="assistant", content=f"  {mark}  ")
        rendered = self.render([user, spaced], add_generation_prompt=False)
        self.keeps_whitespace = f"  {mark}  " in rendered
        opening, to_reply, to_observation, self.after_observation = pieces
        if not to_reply.startswith(self.after_observation):
            self.refuse(changes)
        self.opening = opening + mark + self.after_observation

        # 3. Check that the generation prompt contains all text before a reply, except whitespace.
        # Otherwise agents would have to generate the missing text as part of each reply.
        self.before_reply = to_reply.removeprefix(self.after_observation)
        if self.before_reply.strip():
            self.refuse(f"{self.before_reply!r} is missing from the generation prompt of its chat "
                        "template (add_generation_prompt); use another model")

        # 4. Find the end-of-turn token, the first special token after a reply. The text after this
        # token is the start of the next observation.
        end_tokens = [token for token in special_tokens if token in closing]
        if not end_tokens:
            self.refuse("no special token ends a reply in its chat template; use a chat model")
        # If several tokens start there, tokenizers choose the longest one.
        self.end_token = min(end_tokens, key=lambda token: (closing.index(token), -len(token)))
        size = closing.index(self.end_token) + len(self.end_token)
        self.after_reply = closing[:size]
        self.before_observation = to_observation[size:]

    def special_tokens_in(self, text: str) -> set[str]:
        """Returns all special tokens of the tokenizer, and the turn markers of the chat template.

        Some tokenizers declare turn markers, such as "<|im_start|>", only as added tokens. An added
        token counts as a turn marker if it occurs in `text`, which the template writes around
        messages, and is neither alphanumeric nor whitespace.
        """
        special_tokens = {token for token in self.tokenizer.all_special_tokens if token}
        for added in self.tokenizer.added_tokens_decoder.values():
            token = str(added)
            marks_turns = token in text and not token.isalnum() and token.strip()
            if added.special or marks_turns:
                special_tokens.add(token)
        return special_tokens

    def normalised(self, text: str) -> str:
        """Returns the text after the tokenizer's normalisation, for example to lower case."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is None:
            return text
        return backend.normalizer.normalize_str(text)

    def render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.text, add_generation_prompt=add_generation_prompt,
                tokenize=False)
        except Exception as error:  # a template may raise any error
            self.refuse(f"its chat template fails: {first_line(error)}; use another model")

    def refuse(self, reason: str):
        raise UsageError(f"--model {self.tokenizer.name_or_path}: its tokenizer cannot be used: "
                         f"{reason}")


def first_line(error: Exception) -> str:
    """Returns the first line of an error message. A single word is prefixed with the error's type.
    """
    line, *_ = str(error).strip().splitlines() or [""]
    return line if " " in line else f"{type(error).__name__} {line}".strip()
