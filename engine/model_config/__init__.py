"""The contents of a model folder: shape of the model, its family, its files. Torch-free."""
