"""Whether a model reads: does it repeat what it was shown, also words that it never met?"""

import importlib
import random

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab import tokens as dpo
from lab.pretrain.text import exchange


def copy_loss(model, length: int, n: int = 256) -> float:
    """Nats per token of random tokens of the whole vocabulary said again, after the first."""
    vocabulary = model.config.vocab_size
    random_tokens = torch.Generator().manual_seed(length)
    ids = torch.randint(vocabulary, (n, length), generator=random_tokens).repeat(1, 2)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[:, length:]        # (n, length - 1, V)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1:].flatten()).item()


def answers(model, tokenizer, env: str, fresh: bool, n: int = 300) -> tuple[int, float, float]:
    """How many exchanged words the replies of new practice text hold, which it alone can tell, and
    how often the likeliest of all such words is the one said, and one that was shown. fresh: they
    are words that no text held."""
    source = importlib.import_module(f"lab.pretrain.{env}")
    kinds, rng, encoder = source.exchanged(), random.Random(1), dpo.Encoder(tokenizer)
    frame = set(encoder.observation(""))

    def tokens(words) -> set[int]:
        return {i for word in words for i in encoder.observation(word)} - frame

    unknown = tokens(word for kind in kinds for word in kind.fresh)
    known = tokens(word for kind in kinds for word in (*kind.words, *kind.pool))
    told, words = unknown if fresh else known, torch.tensor(sorted(unknown | known))
    asked = same = shown = 0
    for conversation in source.conversations(1, n):
        conversation = exchange(rng, conversation, kinds, fresh=fresh)
        ids, mask = (x[:2048] for x in encoder.encode(conversation))
        places = [k for k, i in enumerate(ids) if mask[k] and i in told and i in ids[:k]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]                     # (l, V)
        for k in places:
            likeliest = words[logits[k - 1, words].argmax()].item()
            asked += 1
            same += likeliest == ids[k]
            shown += likeliest in told.intersection(ids[:k])
    return asked, same / asked, shown / asked


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)
