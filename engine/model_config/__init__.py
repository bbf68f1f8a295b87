"""What a model folder says: shapes, families, checkpoints. Torch-free."""
