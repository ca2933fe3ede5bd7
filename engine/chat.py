"""Chat templates: encodes conversations as token ids, with a mask of the agent's own tokens.

A run uses `Encoder`, which makes the ids of an opening, of replies and of observations, and the
action mask with them. `Template` takes a tokenizer's chat template apart for it.
"""

import hashlib
from dataclasses import replace

from common.settings import UsageError
from dpo import Ids, Trajectory
from engine.sampling import Sampler


class Encoder:
    """Encodes conversations piece by piece: an opening, then replies and observations in turn.

    Each piece is tokenised once, when it is added. The ids that an agent sampled are therefore
    never replaced by a new tokenisation of their text. The action mask is made together with the
    ids. It is 1 on replies, including their end-of-turn tokens, and 0 on all other tokens. An
    end-of-turn token that was appended to an agent's reply has 0.

    An opening or observation ends with the template's generation prompt. Anything else that the
    template writes before a reply, such as Llama 2's space, belongs to the reply.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        vocabulary_size: Number of rows of the model's embedding. The default is the tokenizer's
            largest id plus 1.

    Raises:
        UsageError: The ids of the pieces differ from those of the rendered conversation.
    """

    def __init__(self, tokenizer, vocabulary_size: int | None = None):
        self.tokenizer = tokenizer
        all_ids = tokenizer.get_vocab().values()  # they may have gaps
        self.vocabulary_size = vocabulary_size or max(all_ids) + 1
        self.valid_ids = {i for i in all_ids if i < self.vocabulary_size}
        self.template = Template(tokenizer)
        self.special_tokens = self.template.special_tokens
        # Some tokenizers match their tokens in the normalised text, in normalised form. A message
        # must contain neither form.
        normalised = map(self.template.normalised, self.special_tokens)
        self.forgeries = sorted({*self.special_tokens, *normalised} - {""})
        self.end_of_turn = tokenizer.convert_tokens_to_ids(self.template.end_token)
        messages = hard_conversation()
        for count in range(len(messages)):
            self.encode(messages[:count + 1], opening=1)

    # Encoding of pieces.

    def start(self, messages: list[dict]) -> Ids:
        """Returns the ids of an opening, including the generation prompt of the first reply."""
        return self.tokenise(self.render(messages, add_generation_prompt=True))

    def reply(self, text: str) -> Ids:
        """Returns the ids of a reply that is given as text, including its end-of-turn token."""
        content = self.plain(text, is_reply=True)
        piece = self.template.before_reply + content + self.template.after_reply
        return self.ids_after(self.template.opening, piece)

    def observation(self, text: str) -> Ids:
        """Returns the ids between a reply's end-of-turn token and the beginning of the next reply.
        """
        before, after = self.template.before_observation, self.template.after_observation
        return self.ids_after(self.template.end_token, before + self.plain(text) + after)

    def plain(self, text: str, is_reply: bool = False) -> str:
        """Returns a message's text without outer whitespace and with its special tokens broken up.

        With special tokens, a text could end its message and forge another one. Whitespace around a
        reply stays if the template keeps it.
        """
        if not isinstance(text, str):
            raise UsageError(f"the content of a message is {text!r:.60}, which is no text; fix the "
                             "source of the message")
        if text != text.encode(errors="replace").decode():
            raise UsageError(f"the content of a message is {text!r:.60}, which has a lone "
                             "surrogate; fix the source of the message")
        text = break_up(text, self.special_tokens)
        normal = self.template.normalised(text)
        if any(token in normal for token in self.forgeries):  # the text has variants of tokens
            text = break_up(normal, self.forgeries)
        return text if is_reply and self.template.keeps_whitespace else text.strip()

    def render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """Returns the template's text of a conversation, without special tokens in its contents."""
        plain_messages = []
        for message in messages:
            content = self.plain(message["content"], message["role"] == "assistant")
            plain_messages.append({**message, "content": content})
        return self.template.render(plain_messages, add_generation_prompt)

    def ids_after(self, context: str, text: str) -> Ids:
        """Returns the ids that a text has when it follows a context."""
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

    # Encoding of whole conversations.

    def encode(self, messages: list[dict], opening: int) -> tuple[Ids, Ids]:
        """Encodes a conversation, and checks the ids against those of its rendered text.

        Args:
            messages: The opening, then replies and observations in turn, each {role, content}.
            opening: Number of messages before the first reply that is an action.

        Returns:
            The ids and the action mask, each of shape (l,).

        Raises:
            UsageError: The ids differ from those of the whole conversation, rendered at once.
        """
        for number, message in enumerate(messages, 1):
            if set(message) != {"role", "content"}:
                raise UsageError(f"message {number} has the fields {', '.join(message)}; give it "
                                 "role and content, and nothing else")
        # 1. Encode message by message.
        t = Trajectory()
        t.extend(self.start(messages[:opening]), is_action=False)
        for number, message in enumerate(messages[opening:], opening + 1):
            if message["role"] == "assistant":
                self.check_whitespace(message["content"], number)
                t.extend(self.reply(message["content"]), is_action=True)
            else:
                t.extend(self.observation(message["content"]), is_action=False)

        # 2. Compare with the ids of the whole conversation.
        ends_with_reply = messages[-1]["role"] == "assistant"
        expected = self.tokenise(self.render(messages, add_generation_prompt=not ends_with_reply))
        if ends_with_reply:
            # Text after the last end-of-turn token, such as ChatML's line break, opens the next
            # observation.
            expected = expected[:len(t.ids)]
        if expected != t.ids:
            roles = ", ".join(message["role"] for message in messages[:4])
            self.template.refuse(
                f"its chat template renders {len(messages)} messages ({roles} ...) at once "
                "differently from message by message; alternate user and assistant messages, and "
                "use an Instruct model that does not think and does not number or change messages")
        return t.ids, t.action_mask

    def check_whitespace(self, reply: str, number: int) -> None:
        """Raises UsageError if the template would remove whitespace from the start of a reply."""
        if isinstance(reply, str) and reply[:1].isspace() and not self.template.keeps_whitespace:
            self.template.refuse(f"its chat template removes the whitespace that message {number} "
                                 "begins with; remove it from the message, or use another model")

    def decode(self, ids: Ids) -> str:
        """Returns the exact text of ids, without end-of-turn tokens."""
        ids = [i for i in ids if i != self.end_of_turn]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def close(self, ids: Ids, stops: tuple[str, ...]) -> tuple[Ids, Ids, str]:
        """Ends a sampled reply before its first stop string.

        Args:
            ids: The sampled ids.
            stops: The stop strings.

        Returns:
            The sampled ids that are kept, the ids to add (an end-of-turn token unless the kept ids
            end with one), and the reply, which is the text of the kept ids.
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
        # The last letters of the reply and the stop string's whitespace may share a token, such as
        # "]\n". That token is kept if it adds no other text to the reply.
        reply = self.decode(ids[:size]).strip()
        longer = self.decode(ids[:size + 1]).strip()
        if reply != wanted.strip() and longer == wanted.strip():
            return ids[:size + 1], [self.end_of_turn], longer
        return ids[:size], [self.end_of_turn], reply

    def reply_ends(self, t: Trajectory) -> list[int]:
        """Returns the positions in t.ids of the end-of-turn tokens of its replies, (t.turns,).

        The trajectory has to end with a reply. Every reply has an end-of-turn token, because one is
        appended if the agent does not write it.
        """
        ends = []
        for position, token in enumerate(t.ids):
            if token == self.end_of_turn:
                ends.append(position)
        # In most templates, the same token also ends the messages that the agent reads. Then every
        # second end, counted from the last one, belongs to a reply.
        stride = 1 + self.observation("").count(self.end_of_turn)
        last_first = ends[::-1][::stride]
        return sorted(last_first[:t.turns])

    def cut(self, t: Trajectory, replies: int) -> Trajectory:
        """Returns the trajectory with only its first `replies` replies."""
        if replies >= t.turns:
            return t
        size = self.reply_ends(t)[replies - 1] + 1
        return replace(t, ids=t.ids[:size], action_mask=t.action_mask[:size], turns=replies,
                       ended="turn_limit")

    def without_ends(self, t: Trajectory) -> Trajectory:
        """Returns the trajectory with an action mask of 0 on its end-of-turn tokens.

        The mask is also 0 on the last reply if that reply ended the episode. If no action token
        would be left, the trajectory is returned unchanged.
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
        """Returns the distribution that agents sample from.

        It suppresses special tokens except for the end-of-turn token, and rows of the embedding
        that belong to no token.
        """
        special_ids = self.tokenizer.convert_tokens_to_ids(self.special_tokens)
        allowed = self.valid_ids - set(special_ids) | {self.end_of_turn}
        suppressed = set(range(self.vocabulary_size)) - allowed
        return Sampler(temperature, tuple(sorted(suppressed)), self.vocabulary_size)

    def fingerprint(self) -> str:
        """Returns a hash of the chat template, the special tokens and the tokenizer.

        Encoders with the same fingerprint encode every conversation alike.
        """
        tokenizer = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:
            tokenizer = self.tokenizer.backend_tokenizer.to_str()
        state = repr([self.template.text, self.special_tokens, tokenizer])
        return hashlib.sha256(state.encode()).hexdigest()[:16]


def break_up(text: str, tokens: list[str]) -> str:
    """Returns the text with each of the given tokens broken up, so that it is only text.

    A space follows the token's first character. A token of one character becomes its code point.
    """
    for token in tokens:
        if len(token) == 1:
            text = text.replace(token, f"U+{ord(token):04X}")
        else:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def hard_conversation() -> list[dict]:
    """Returns twelve messages that a chat template may change.

    Some templates number messages, leave out reasoning, escape quotes and brackets, squeeze spaces
    and empty lines, or shorten long texts. The contents have all of these.
    """
    messages = []
    for n in range(6):
        for role in ["user", "assistant"]:
            content = (f"<think>a {n}</think> It's [{n}] & <b>\"c\"</b>, {{'d': \"e\"}}\n\n\n"
                       f"f  g\n\n```h```\n{'long text ' * 20}{role} {n}.")
            messages.append(dict(role=role, content=content))
    return messages


# Some templates write today's date. The prompt must not change at midnight, and a saved agent must
# read the same prompt in other tools as in training. This macro, placed before such a template,
# fixes the date at 26 July 2024, the default of Llama 3's template.
FIXED_DATE = """{%- macro strftime_now(form) -%}
    {{- form | replace("%d", "26") | replace("%m", "07") | replace("%Y", "2024")
        | replace("%y", "24") | replace("%b", "Jul") | replace("%B", "July")
        | replace("%a", "Fri") | replace("%A", "Friday") -}}
{%- endmacro -%}"""


class Template:
    r"""The chat template of a tokenizer, taken apart into the text around messages.

    ChatML, for example, renders the text below, where \n is a line break. Llama 2 and other
    templates differ only in the text between the contents:

        <|im_start|>user\nbuy a mug<|im_end|>\n<|im_start|>assistant\n       the opening
        click[mug]<|im_end|>                                               a reply
        \n<|im_start|>user\nBought.<|im_end|>\n<|im_start|>assistant\n        an observation

    Args:
        tokenizer: A tokenizer of transformers.

    Raises:
        UsageError: The tokenizer has no chat template, or one that cannot be taken apart like this.
    """

    # The text around contents, with its values in the example above:
    before_reply: str        # empty; a space in Llama 2
    after_reply: str         # <|im_end|>
    before_observation: str  # \n<|im_start|>user\n
    after_observation: str   # <|im_end|>\n<|im_start|>assistant\n, with the generation prompt
    end_token: str           # <|im_end|>, the end-of-turn token of a reply
    opening: str             # an example of an opening
    keeps_whitespace: bool   # True if whitespace around a reply is kept
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
        if "strftime_now" in self.text and FIXED_DATE not in self.text:
            self.text = FIXED_DATE + self.text

        # 2. Render conversations whose contents are all the same mark, and split them at the marks.
        mark = "CONTENT"
        while mark in self.text:
            mark += "X"
        user = dict(role="user", content=mark)
        assistant = dict(role="assistant", content=mark)
        pieces = self.render([user, assistant, user], add_generation_prompt=True).split(mark)
        closing = self.render([user, assistant], add_generation_prompt=False).split(mark)[-1]
        changes = ("its chat template changes a message once it is answered; use an Instruct model "
                   "that does not think")
        if len(pieces) != 4:  # the text before, between and after three contents
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

        # 3. The generation prompt has to contain all text before a reply. Otherwise agents would
        # have to write the rest themselves, and would be trained to do so.
        self.before_reply = to_reply.removeprefix(self.after_observation)
        if self.before_reply.strip():
            self.refuse(f"{self.before_reply!r} is missing from the generation prompt of its chat "
                        "template (add_generation_prompt); use another model")

        # 4. The first special token after a reply ends it. The text after that token opens the next
        # observation.
        end_tokens = [token for token in special_tokens if token in closing]
        if not end_tokens:
            self.refuse("no special token ends a reply in its chat template; use a chat model")
        self.end_token = min(end_tokens, key=closing.index)
        size = closing.index(self.end_token) + len(self.end_token)
        self.after_reply = closing[:size]
        self.before_observation = to_observation[size:]

    def special_tokens_in(self, text: str) -> set[str]:
        """Returns the tokenizer's special tokens, and the added tokens that mark turns in a text.

        An added token marks turns if the template writes it and it is neither a word nor
        whitespace.
        """
        special_tokens = {token for token in self.tokenizer.all_special_tokens if token}
        for token in self.tokenizer.added_tokens_decoder.values():
            marks_turns = str(token) in text and not str(token).isalnum() and str(token).strip()
            if token.special or marks_turns:
                special_tokens.add(str(token))
        return special_tokens

    def normalised(self, text: str) -> str:
        """Returns a text as the tokenizer's normaliser changes it."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is None:
            return text
        return backend.normalizer.normalize_str(text)

    def render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """Returns the text of a conversation, followed by the generation prompt if requested."""
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
    """Returns the first line of an error's message, with the error's type if it is a single word.
    """
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if " " in lines[0] else f"{type(error).__name__} {lines[0]}".strip()
