"""What front and engine say to each other: small, typed, batched per step. Torch-free.

Handles are drawn by the front, one for each sequence, and are never reused within one engine
process. KV does not pass here: it lies in slots of the shared arena, and messages name slots.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from engine.ipc.counters import Counters, SpecFigures
from engine.ipc.spec import Ceilings
from engine.kv_cache.kv_format import Codec, KVFormat, Piece
from protocol.requests import Finish, Logprobs, Request


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---- front -> engine -----------------------------------------------------------------------


class Generate(_Message, frozen=True):
    """Compute the context here, then decode."""

    handle: int
    request: Request


class Prefill(_Message, frozen=True):
    """Compute the context, send one token, offer the KV from block ``skip_blocks`` on, and hold
    the pages until ``Drop``."""

    handle: int
    request: Request
    skip_blocks: int
    frame_bytes: int
    codec: Codec


class Export(_Message, frozen=True):
    """Compute nothing: offer the KV of the context's full blocks that are cached, from block
    ``skip_blocks`` on, and hold them until ``Drop``. Answered by ``Started``."""

    handle: int
    request: Request
    skip_blocks: int
    frame_bytes: int
    codec: Codec


class Import(_Message, frozen=True):
    """Take pages for the full blocks of the context that are not cached, as far as nobody needs
    them; answered by ``Importing``. Its end, whatever brings it, is ``Adopted``."""

    handle: int
    request: Request


class Adopt(_Message, frozen=True):
    """No further frame of this import comes: cache what has come whole."""

    handle: int


class Receive(_Message, frozen=True):
    """Look up what is cached; answered by ``Found``."""

    handle: int
    request: Request


class Reserve(_Message, frozen=True):
    """Queue for the pages of the missing blocks; answered by ``Reserved``."""

    handle: int


class Ingest(_Message, frozen=True):
    """A checked frame lies in ``slot``; scatter it, then give the slot back (``SlotsFree``)."""

    handle: int
    slot: int
    piece: Piece
    nbytes: int
    codec: Codec


class Join(_Message, frozen=True):
    """Every frame has been given; ``token`` is the first output."""

    handle: int
    token: int


class Grant(_Message, frozen=True):
    """``frames`` more of this prefill may be put into slots."""

    handle: int
    frames: int


class Drop(_Message, frozen=True):
    """Forget the sequence; its pages are free at once."""

    handle: int


class TakeRole(_Message, frozen=True):
    """Plan steps as workers of this role do, from the next one on; what runs, goes on."""

    role: str


class SlotsFree(_Message, frozen=True):
    """Slots that the receiver has emptied (both ways)."""

    slots: list[int]


Command: TypeAlias = (
    Generate
    | Prefill
    | Export
    | Import
    | Adopt
    | Receive
    | Reserve
    | Ingest
    | Join
    | Grant
    | Drop
    | TakeRole
    | SlotsFree
)


# ---- engine -> front -----------------------------------------------------------------------


class Progress(_Message, frozen=True):
    """Loading: what is being done, and how much of it."""

    what: str
    fraction: float


class Ready(_Message, frozen=True):
    """The engine takes commands. ``step_seconds``: the longest step seen in warm-up;
    ``speculation``: what proposes tokens, or why nothing does. ``ceilings``: of its machine."""

    fingerprint: str
    vocab_size: int
    max_model_len: int
    kv: KVFormat
    kv_tokens: int
    step_seconds: float
    speculation: str = "off"
    ceilings: Ceilings = Ceilings()
    element_bytes: int = 4  # of a weight
    gpu: bool = False

    @property
    def kv_identity(self) -> str:
        """Workers with the same one may read each other's KV."""
        return f"{self.fingerprint}/{self.kv.precision}"


class Failed(_Message, frozen=True):
    """The engine cannot start; the text is for the operator."""

    why: str


class Refused(_Message, frozen=True):
    """This request cannot be taken: the fault is in ``param``, or the engine is busy."""

    handle: int
    why: str
    param: str  # empty: no field in particular
    code: str = ""
    busy: bool = False  # another engine may take it


class PromptLogprobs(_Message, frozen=True):
    """Of the prompt, from its second token on; the first token follows."""

    handle: int
    logprobs: list[Logprobs]


class Found(_Message, frozen=True):
    """Leading tokens of the context that are cached here."""

    handle: int
    cached_tokens: int


class Reserved(_Message, frozen=True):
    """The pages are there: KV may come."""

    handle: int


class Importing(_Message, frozen=True):
    """Leading blocks that are cached here, and those that are or have a page."""

    handle: int
    cached_blocks: int
    blocks: int


class Adopted(_Message, frozen=True):
    """The import has ended, as asked for or because others need its pages: leading tokens that
    are cached now."""

    handle: int
    cached_tokens: int


class Broken(_Message, frozen=True):
    """The KV cannot be received as planned: the sequence is to be dropped and placed anew."""

    handle: int
    why: str


class Started(_Message, frozen=True):
    """The prefill was admitted: its pages are there."""

    handle: int
    cached_tokens: int


class Joined(_Message, frozen=True):
    """KV that came from elsewhere is in place: the sequence decodes from this step on."""

    handle: int


class Frame(_Message, frozen=True):
    """KV of a prefill lies in ``slot``; ``last``: no further frame follows."""

    handle: int
    sequence: int
    slot: int
    piece: Piece
    nbytes: int
    last: bool


class Tokens(_Message, frozen=True):
    """Tokens of one step: parallel lists. ``logprobs`` is empty where nobody asked for any."""

    handles: list[int]
    tokens: list[int]
    finishes: list[Finish]
    logprobs: list[Logprobs | None] = []


class Cached(_Message, frozen=True):
    """What came into the prefix cache (True) and went (False), in order: runs of block keys, packed
    back to back. A block comes after its parent, and goes before it."""

    changes: list[tuple[bool, bytes]]


class Beat(_Message, frozen=True):
    """The loop turns. Sent at least every BEAT_S, with the load. ``step_model``: coefficients of
    ``step_time.py``, as fitted so far; ``pace``: tokens that a sequence got in the
    time of a plain step, of late: 1 without speculation."""

    running: int
    waiting: int
    queued_tokens: int
    pages_free: int
    step_model: tuple[float, ...] = ()
    counters: Counters = msgspec.field(default_factory=Counters)
    speculation: SpecFigures = SpecFigures()
    pace: float = 1.0


Event: TypeAlias = (
    Progress
    | Ready
    | Failed
    | Refused
    | PromptLogprobs
    | Found
    | Reserved
    | Importing
    | Adopted
    | Broken
    | Started
    | Joined
    | Frame
    | SlotsFree
    | Tokens
    | Cached
    | Beat
)

BEAT_S = 0.5
