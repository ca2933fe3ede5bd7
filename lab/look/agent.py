"""A trained agent at a terminal: it proposes a reply and says what else it had in mind."""

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from lab.engine.cache import next_token_logits, slot_cache
from lab.engine.prepacked import prepack
from lab.harness.settings import Settings
from lab.play_env import STOPS
from lab.playing.rollout import Sampling, Slot
from lab.tokens import Encoder, Trajectory
from lab.training.models import in_bf16, load_model


class Agent:
    """A trained agent that proposes its greedy replies, as in evaluations, and can be overruled."""

    def __init__(self, folder, s: Settings):
        disable_progress_bar()
        self.encoder, self.proposed = Encoder(AutoTokenizer.from_pretrained(folder)), None
        self.model = load_model(folder, torch.bfloat16 if in_bf16(s) else torch.float32).eval()
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        prepack(self.model)
        self.cache = slot_cache(self.model, 1, s.max_tokens)
        self.suppress_tokens = torch.tensor(self.encoder.suppress_tokens(
            self.model.config.get_text_config().vocab_size), device=self.model.device)
        self.slot = Slot(0, self.encoder, Sampling(
            0.0, s.max_tokens, s.max_new_tokens, s.tokens_per_forward, slots=1,
            stops=STOPS[s.options.protocol]))
        self.slot.begin(Trajectory())

    def read(self, messages: list[dict]) -> None:
        """Its context becomes the conversation: its own replies as written, a person's as said."""
        slot, t = self.slot, self.slot.playing
        for message in messages[len(t.messages):] if t.messages else messages[-1:]:
            if not t.messages:
                t.ids = self.encoder.start(messages)
            elif message["role"] == "user":
                t.ids += self.encoder.observation(message["content"])
            elif message["content"] != self.proposed:
                del t.ids[slot.reply_at:]
                slot.past = min(slot.past, slot.reply_at)
                t.ids += self.encoder.reply(message["content"])
            if message["role"] == "user":
                slot.reply_at, self.proposed = len(t.ids), None
        t.messages = list(messages)

    @torch.inference_mode()
    def propose(self, messages: list[dict]) -> tuple[str | None, str]:
        """Its reply, None where that would fill its context, and what it had in mind."""
        self.read(messages)
        slot, t, minds = self.slot, self.slot.playing, []
        while len(t.ids) < slot.sampling.max_tokens and not t.ended:
            logits = next_token_logits(self.model, self.cache, [
                (0, slot.past, t.ids[slot.past:])])                                         # (1, V)
            logits[:, self.suppress_tokens] = -torch.inf
            p, tokens = logits[0].softmax(-1).topk(min(3, logits.shape[1]))
            minds.append(list(zip(tokens.tolist(), p.tolist())))
            self.proposed = slot.write(tokens[0].item())
            if self.proposed is not None:
                return self.proposed, self.told(t.ids[slot.reply_at:], minds)
        return None, ""

    def told(self, ids: list[int], minds: list) -> str:
        """The three best tokens where the action begins, and where it was least sure."""
        decode = self.encoder.tokenizer.decode
        first = first_of_action(decode, ids[:len(minds)])
        doubt = min(range(first, len(minds)), key=lambda n: minds[n][0][1])
        at, least = (", ".join(f"{decode([token])!r} {p:.1%}" for token, p in minds[n])
                     for n in (first, doubt))
        return f"The action begins with {at}" + f"\nLeast sure: {least}" * (doubt != first)


def first_of_action(decode, ids: list[int]) -> int:
    """Which token is the first of the action: after the last "Action:", or of the reply."""
    whole = decode(ids)
    if "Action:" not in whole:
        return 0
    spoken = whole.rindex("Action:") + len("Action:")
    return next((n for n in range(len(ids)) if decode(ids[:n + 1])[spoken:].strip()), 0)
