"""The engine beside transformers and the limits of the machine: `python -m bench.engine`."""
