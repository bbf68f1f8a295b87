"""What crosses a process boundary, and the value types that several packages share. Torch-free; it
imports no other package of Baton, and every package may import it.

    errors.py           the tree of errors
    requests.py         Request, Logprobs; sampling_params.py: SamplingParams
    wire/               wire.proto, the RPC messages between router and workers
    block_keys.py       hash keys of KV blocks
    kv_events.py        what workers have cached, as published in Redis
    liveness.py         limits for silent workers; roles.py: prefill and decode
    registry/           records of live processes in Redis
    security/           cluster token, certificates, TLS files, which hosts may be listened on
    endpoints/          how gRPC and metrics ports are opened and dialled
"""
