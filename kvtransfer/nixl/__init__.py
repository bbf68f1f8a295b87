"""NIXL, NVIDIA's transfer library (RDMA, shared memory, TCP), in a process of its own.

    front of D                    mover of D               mover of P             front of P
    MoverProcess --Read--> mover.py: NixlAgent --READ--> its arena's slots    MoverProcess
                 <--ReadDone--      writes D's slot

package.py        whether the library is installed and of use, without importing it
messages.py       what front and mover say to each other, and the address that D gets from P
agent.py          the library's calls, used by the mover alone
mover.py          the mover: `python -m kvtransfer.nixl.mover`
stalls.py         when a read counts as stuck
mover_process.py  one mover as its front sees it
peers.py          the movers of other workers that this mover knows
mover_keeper.py   starts a mover when one is needed, and replaces one that was lost

A transfer of NIXL that has begun cannot be ended: measured with version 1.5.1 over TCP and over
shared memory, a read whose handle was released and whose peer was invalidated still wrote its bytes
when the peer, which had been stopped, went on. UCX, below it, ends its process on some errors. So
the library runs in a child process, and killing that process is how a read is ended: a slot is
given to others only when the read into it is done or its mover is gone.

A worker has up to two movers, each started when it is first needed: one serves this worker's
filled slots to the movers of others, and one reads theirs. A stuck read ends the second alone.

A mover maps one engine session's arena, never the pages of the KV pool. Slots are host memory, so
NVLink is not used.
"""
