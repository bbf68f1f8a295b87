"""From logits to a token, as a function of (logits, request, tokens so far, position).

One line per module, in the order that logits meet them:

    logprobs   what the model itself says, before anything is changed
    bias       logit bias, and the ban of end and stop tokens before ``min_tokens``
    penalties  repetition, presence and frequency
    filters    top-k, top-p and min-p: a cut-off, and a draw among the few above it
    noise      counter-based Gumbel noise, and a draw over the whole vocabulary
    table      every request's parameters, one row each
    selection  what is to be done for the rows that draw, worked out once while they stay
    draft_rows the rows of a step that verifies drafts: several of a sequence
    spread     from what is to be done for sequences to what is to be done for such rows
    draw       all of it, for one step

Each function takes a batch of rows, and a row's result does not depend on the others.
"""
