"""The decode role of a worker.

service.py      DecodeService: Decode.Attach
router_link.py  RouterLink: the stream of outputs to one router
request.py      DecodeRequest: one request and its states; decides where its prompt is prefilled
handover.py     Handover: one prefill on another worker, with the KV that it sends

Its step policy is ``plan_decode_step`` in engine/scheduling/step_policy.py.
"""
