"""The carriers: the ways by which a frame of KV gets from a slot of one worker into another worker.

grpc_carrier.py  frames on a gRPC stream, which every worker has
tcp_*.py         frames on sockets of their own, straight between slots
local_*.py       the other worker's slots mapped read-only, on one host
nixl_*.py        the other worker's slots read over RDMA, by processes of ``kvtransfer.nixl``
slot_outbound.py the sender's end where the receiver reads slots itself

What a carrier must do is in kvtransfer/carrier.py, and how to add one in the docstring of
``kvtransfer``.
"""
