"""What a machine can hold: episodes on a card, a model on it in fp32, agents on the disk."""

FREE = 0.92  # of a card's memory: contexts, NCCL's buffers and the allocator's gaps take the rest
SLOTS = 128  # at most; up to there a pass that decodes hardly takes longer with more rows [ours]


def slots_that_fit(config, parameters: int, free: float, tokens: int,
                   training_ranks: int = 0, bf16: bool = True) -> int:
    """How many episodes a card can play side by side, with a copy of the model.

    Args:
        config: That of the model.
        parameters: How many it has.
        free: Bytes of the card that nothing holds yet.
        tokens: Of the longest conversation. Rows are padded, so that each may become as long.
        training_ranks: Over how many ranks the model trains beside its copy; 0: it does not.
        bf16: Whether the copy is in bf16, else in fp32.
    """
    size_of_a_number = 2 if bf16 else 4
    text = config.get_text_config()
    queries = heads_of(config)
    heads = getattr(text, "num_key_value_heads", None) or queries
    size = getattr(text, "head_dim", None) or text.hidden_size // max(1, queries)
    inside = getattr(text, "intermediate_size", None) or 4 * text.hidden_size

    # Where a parameter trains, 4 bytes for each of weight, gradient, two moments, and of pi_ref.
    weights = size_of_a_number * parameters
    if training_ranks:
        weights += 20 * parameters / training_ranks

    # A token takes keys and values in all layers, and the inside of the layer that reads it.
    keys_and_values = 2 * text.num_hidden_layers * heads * size
    layer = 6 * text.hidden_size + 3 * inside
    each = size_of_a_number * (keys_and_values + layer) * tokens
    fitting = int((FREE * free - weights) / each)
    return max(1, min(SLOTS, fitting))


def fits_in_fp32(config, parameters: int, free: float, tokens: int) -> bool:
    """Whether a card has room for the trial of a model with two texts of so many tokens."""
    # Where CUDA has no fused attention, as in fp32, the scores of all heads are there three times.
    scores = 3 * 2 * heads_of(config) * tokens ** 2 * 4
    return 4 * parameters + scores < FREE * free


def heads_of(config) -> int:
    """How many heads attend in a layer; 0 in a state-space model, such as Mamba."""
    return getattr(config.get_text_config(), "num_attention_heads", None) or 0


def disk_needed(parameters: int, agents: int, moments: int = 0, states: bool = False) -> int:
    """The bytes that a run writes.

    Args:
        parameters: Of an agent, whose weights are fp32 on disk, whatever the base's are.
        agents: How many are kept.
        moments: How many of them have AdamW's two moments of each weight beside them.
        states: Whether a long phase keeps one to go on from: weights and two moments of each. The
            next one is written before the last one goes.
    """
    needed = 4 * parameters * agents + 8 * parameters * moments
    if states:
        needed += 2 * 12 * parameters
    return needed
