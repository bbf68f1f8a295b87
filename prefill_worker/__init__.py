"""The prefill role of a worker: the Prefill.Run service.

Its step policy is ``plan_prefill_step`` in engine/scheduling/step_policy.py.
"""
