"""Training, evaluation and export of the demo models and of their Medusa and EAGLE heads."""
