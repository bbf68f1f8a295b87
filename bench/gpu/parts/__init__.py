"""The parts of ``python -m bench.gpu``: one module each, with a function that gets a context."""
