"""Speculative decoding: several tokens of a sequence in one step of its model.

    lengths      how many tokens to propose to each sequence of a step      (controller.py)
    proposer     proposes them                                               (proposer.py)
    the model    computes them beside everything else, in one packed pass    (execution/stepper.py)
    acceptance   a draft is accepted where it equals the model's own draw    (acceptance.py)

Text never depends on any of it: a token is the model's own draw, a function of (logits, parameters,
seed, choice, position), whether a proposal met it or not. What is proposed decides how many of
these draws a step can use.
"""
