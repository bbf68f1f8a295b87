"""KV transfer: moves the KV of a prompt from one worker (P) to another (D).

A KV frame passes these files, in this order:

    1. prefill_worker/served_call.py  a slot that P's engine has filled becomes an OutboundFrame,
                                      whose header (frames.py) has the checksum of the payload
    2. carriers/                      the carrier that D and P agreed on brings it: grpc and tcp
                                      send the bytes; local tells D which slot of P to read
    3. inbound_frames.py              THE CHECKS: InboundFrames.admit (unpack_header: length, magic,
                                      checksum; ExpectedFrames.check: transfer, piece, codec, size,
                                      each once; a credit), then ``filled`` (payload's checksum)
    4. inbound.py                     InboundTransfer gives the slot to D's engine (Ingest), which
                                      writes the pages

A frame that fails a check ends its transfer before it touches a page. Frames that are read in place
(local) are checked by D's engine, with the generation of the slot beside the checksum.

Each transfer has a control call, Prefill.Run: prefill_call.py is the receiver's end of it, and
prefill_worker/service.py the sender's. Two callers receive KV: decode_worker/handover.py (the KV of
a prefill) and peer_fetch.py (blocks that another worker has cached). Credits (credits.py) travel on
the control call: a credit is a slot of D, or of P where D's engine reads in place. links.py decides
which carriers are offered to which worker, and traffic.py counts what came.

To add a carrier, write a class with the methods of ``Carrier`` (carrier.py says what each must do)
in carriers/, create it in cluster/worker/carriers.py at its place in the order, give its expected
rate in ``DEFAULT_BYTES_S`` (links.py), and add its name to ``CARRIERS`` of the tests
(tests/kvtransfer/fronts.py): the suite test_carriers.py says what it still lacks. Frames, checks,
credits, deadlines, metrics and the control call stay as they are.
"""
