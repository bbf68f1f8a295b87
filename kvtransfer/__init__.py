"""KV transfer: moves the KV of a prompt from one worker to another over gRPC.

A KV frame passes these files, in this order:

    1. sender.py            KVServer and OutboundTransfer take a filled slot from the engine
    2. frames.py            pack_frame adds the header and the checksum
    3. receiver.py          KVPull reads the stream on a thread of KVClient
    4. frames.py            THE CHECKS: unpack_frame (length, magic, checksum), then
                            ExpectedFrames.check (transfer, order, piece, codec, size)
    5. receiver.py          a frame needs a slot that was granted: CreditWindow, InboundSlots
    6. prefill_call.py      InboundTransfer gives the slot to the engine, which writes the pages

``KVPull._accept`` in receiver.py runs steps 4 and 5 for every frame; a frame that fails a check
ends its transfer before it touches a page.

Each transfer has a control call, Prefill.Run: prefill_call.py is the receiver's end of it, and
prefill_worker/service.py the sender's. Two callers receive KV: decode_worker/handover.py (the KV of
a prefill) and peer_fetch.py (blocks that another worker has cached).

To add a KV transport, write a counterpart of ``KVServer`` (sender.py) and of ``KVClient``
(receiver.py) that carries the packed frames of one transfer id in order, create both in
cluster/worker/worker.py, and announce the server as ``kv_endpoint`` of the worker's record
(protocol/registry/directory.py), which must be host:port. Frames, checks, credits and the control
call stay as they are: let ``open`` return a ``KVPull`` on the transport's own stream (an iterator
of frames with ``cancel``), and have ``KVPull.read_frames`` turn the errors of that stream, too,
into TransferFailed. The metrics name the transport by ``TRANSPORT`` in cluster/worker/metrics.py.
"""
