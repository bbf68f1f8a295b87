"""Triton kernels of the engine on a GPU, each tested against the torch code that the CPU runs.

Only this folder imports Triton, which a CPU installation does not have. Nothing imports this folder
at module level: ``engine.model.layer_ops`` loads it when the model is on a GPU. With the environment
variable TRITON_INTERPRET=1 the same kernels run on CPU tensors, which is how tests run them.
"""
