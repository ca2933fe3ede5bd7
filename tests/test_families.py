"""Every family of causal language models of text that transformers can build small, on the core."""

import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from family_models import CLASSES, default, tiny_model

import coevolve
import dpo

DOCS = (Path(__file__).parent.parent / "docs" / "large_models.md").read_text(encoding="utf-8")
MUSIC = ("musicgen", "musicgen_melody")  # their tokens are sounds
# Others are another family's classes, or load as the text model of another family.
FAMILIES = [name for name in CLASSES if name not in MUSIC
            and (default(name).model_type == name or default(name).model_type not in CLASSES)]
LONGEST = 64  # tokens of a text: four of the models' windows
WAYS = {  # of passes and of replies -> the heading in docs/large_models.md
    (False, False, True): "side by side with a cache",
    (False, True, True): "replies one at a time",
    (False, False, False): "replies without a cache",
    (False, True, False): "replies one at a time, without a cache"}


@pytest.fixture(scope="module")
def encoder():
    return dpo.Encoder(dpo.read(transformers.AutoTokenizer, coevolve.MODELS["tiny"]))


def random_model(family: str, encoder):
    model = tiny_model(family, vocabulary=len(encoder.tokenizer))
    model.generation_config = transformers.GenerationConfig()
    return model


def outcome(model, encoder) -> str:
    """The heading under which docs/large_models.md has to list its family."""
    try:
        return WAYS[dpo.trial(model, encoder, LONGEST)]
    except dpo.Unusable:
        return "refused"


def plain_log_probs(model, ids: list[int]) -> torch.Tensor:
    """log pi of every next token, (l - 1, V), by transformers alone: one text, no mask, no cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


def texts(encoder) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, len(encoder.tokenizer)) for _ in range(n)] for n in (40, 23, 9)]


def assert_passes_are_right(model, encoder):
    """Log-probabilities of a padded pass, and their gradient with layers that are run again."""
    rng = random.Random(4)
    sequences = [dpo.Trajectory(ids=ids, action_mask=[0] + [int(rng.random() < 0.5) for _ in ids[1:]])
                 for ids in texts(encoder)]
    expected = torch.cat([
        plain_log_probs(model, t.ids)[range(len(t.ids) - 1), t.ids[1:]][
            torch.tensor(t.action_mask[1:]) > 0] for t in sequences])
    with torch.no_grad():
        assert (dpo.token_log_probs(model, sequences) - expected).abs().max() < 1e-4


def assert_replies_are_right(model, encoder, alone: bool, cache: bool):
    """Greedy replies in a batch are those alone; each token is a plain pass's most probable one,
    and a sampled one has its log-probability there."""
    never = encoder.never(model.config.get_text_config().vocab_size)

    def replies(asked, temperature):
        return dpo.replies(model, encoder, dpo.Sampler(temperature, never), 8, (), [
            (ids, random.Random(len(ids))) for ids in asked], alone, cache)

    asked = texts(encoder)
    greedy = replies(asked, 0.0)
    assert greedy == [replies([ids], 0.0)[0] for ids in asked]
    for (new, _), (drawn, log_probs), ids in zip(greedy, replies(asked, 1.0), asked):
        for reply, temperature in ((new, 0.0), (drawn, 1.0)):
            plain = plain_log_probs(model, ids + reply)[len(ids) - 1:]
            plain[:, list(never)] = -torch.inf
            plain = plain.log_softmax(-1)
            found = plain[range(len(reply)), reply]
            wanted = torch.tensor(log_probs) if temperature else plain.amax(-1)
            assert (found - wanted).abs().max() < 1e-4


def listed() -> dict[str, str]:
    """family -> the heading under which docs/large_models.md lists it."""
    return {family: heading for heading, families in
            re.findall(r"^- \*\*(.+?)\*\*.*?: (.+)$", DOCS, re.MULTILINE)
            for family in re.findall("`(.+?)`", families)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_and_plays_as_it_reads_a_text_alone_or_is_refused(family, encoder):
    model = random_model(family, encoder)
    found = outcome(model, encoder)
    if f"transformers {transformers.__version__}" in DOCS:
        assert listed().get(family) == found, "python tests/test_families.py prints the lists"
    for (passes, alone, cache), heading in WAYS.items():
        if heading == found:
            assert not passes
            assert_passes_are_right(model, encoder)
            assert_replies_are_right(model, encoder, alone, cache)


if __name__ == "__main__":
    encoder = dpo.Encoder(dpo.read(transformers.AutoTokenizer, coevolve.MODELS["tiny"]))
    found = defaultdict(list)
    for family in FAMILIES:
        found[outcome(random_model(family, encoder), encoder)].append(f"`{family}`")
    for heading, families in found.items():
        print(f"- **{heading}** ({len(families)}): {', '.join(families)}")
