"""Sampling: from logits to tokens, as a function of (logits, request, tokens so far, position).

The modules, in the order in which a step's logits pass through them:

    logprobs           log-probabilities of the model's unchanged logits
    penalties          logit bias, penalties, allowed tokens, and the ban of end tokens before
                       ``min_tokens``
    filters            top-k, top-p and min-p, and a draw among the few tokens above the threshold;
                       counter-based Gumbel noise, and a draw over the whole vocabulary
    sampling_table     the parameters of every running request, one row each
    sampling_metadata  which rows of the logits need which of these, cached while the rows stay
    sampler            all of it, for one step

Every function takes a batch of rows, and the result of a row does not depend on the others. Nothing
here waits for the device, except for ``TokenDraw.read`` and what follows it.
"""
