"""The model of what work costs on a worker: steps, drafts and their choice."""
