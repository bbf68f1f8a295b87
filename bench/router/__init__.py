"""The routing decision beside Dynamo's: `python -m bench.router`."""
