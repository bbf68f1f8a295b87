"""Proposers of draft tokens: prompt lookup, a draft model, Medusa and EAGLE heads."""
