"""Output that matches a grammar: which tokens may come next, as a function of those so far.

    matcher    one sequence's place in its grammar
    compiler   texts to matchers, off the engine's loop
    masks      a step's rows, packed, while the model computes

The grammars are llguidance's (a JSON schema, a regular expression, Lark), and so is the parser.
"""
