"""Triton kernels of the engine on a GPU, each tested against the torch code that the CPU runs.

Only this folder imports Triton, which a CPU installation does not have. Modules of a CPU import
``paged_rows`` alone, which has no kernel; ``DecoderModel`` and ``Stepper`` load the others when the
model is on a GPU. With the environment variable TRITON_INTERPRET=1 the same kernels run on CPU
tensors, which is how tests run them.
"""
