"""Whether a model reads: does it repeat what it was shown, also words that it never met?"""

import importlib
import random

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
from pretrain.text import exchange


def copy_loss(model, length: int, n: int = 256) -> float:
    """Nats per token of random tokens of the whole vocabulary said again, after the first."""
    vocabulary = model.config.vocab_size
    random_tokens = torch.Generator().manual_seed(length)
    ids = torch.randint(vocabulary, (n, length), generator=random_tokens).repeat(1, 2)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[:, length:]        # (n, length - 1, V)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1:].flatten()).item()


def answers(model, tokenizer, env: str, n: int = 300) -> tuple[int, float, float]:
    """Replies of new practice text, with fresh words exchanged in: those that name one of them.

    Returns their number, the share in which the likeliest word is the one said, and the share in
    which it is a fresh word that the conversation has shown.
    """
    source = importlib.import_module(f"pretrain.{env}")
    kinds, rng, encoder = source.exchanged(), random.Random(1), dpo.Encoder(tokenizer)
    fresh = {i for kind in kinds for word in kind.fresh for i in encoder.observation(word)}
    fresh -= {i for i in encoder.observation("")}
    asked = same = shown = 0
    for conversation in source.conversations(1, n):
        ids, mask = encoder.encode(exchange(rng, conversation, kinds, fresh=True))
        ids, mask = ids[:2048], mask[:2048]
        with torch.no_grad():
            guesses = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        for k, token in enumerate(ids):
            if mask[k] and token in fresh and token in ids[:k]:
                asked += 1
                same += guesses[k - 1] == token
                shown += guesses[k - 1] in fresh.intersection(ids[:k])
    return asked, same / asked, shown / asked


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)
