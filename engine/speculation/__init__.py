"""Speculative decoding: several tokens of a sequence in one step of its model.

    draft lengths  how many tokens to propose to each sequence     (control/controller.py)
    proposer       proposes these tokens                           (proposers/)
    verification   the model computes them in its packed pass      (execution/stepper.py)
    acceptance     a draft token is accepted if it equals the model's own draw

The generated text never depends on speculation: each token is the model's own draw, a function of
(logits, parameters, seed, choice, position), whether or not a draft matched it.
"""
