"""The decode role of a worker.

service.py      DecodeService: Decode.Attach, one stream for each router
router_link.py  RouterLink: outputs to one router, and its requests on this worker
request.py      DecodeRequest: one request and its states; decides where its prompt is prefilled
handover.py     Handover: one prefill on another worker, with the KV that it sends
policy.py       plan: what a decode worker puts into a step
"""
