"""The messages between a front and its engine: small, typed, and sent in one batch per step.

The front is the worker process with the network; ``EngineSession`` speaks for it and
``EngineServer`` for the engine. The front chooses a handle for each sequence and never reuses it
within one engine process. KV is not sent here: it lies in slots of the shared arena, and messages
name the slots.

Commands about slots (``SlotCommand``) have a socket of their own, which the engine's copy thread
reads: they do not wait for a step to end. So they may arrive before or after a command of the same
sequence on the other socket. Events share one socket.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from engine.ipc import pair_messages
from engine.ipc.counters import EngineCounters, SpeculationStatus
from engine.ipc.settings import CopyCosts, MachineCeilings
from engine.kv_cache.kv_format import LAYOUT_VERSION, Codec, KVFormat, KVPiece
from protocol.performance.speculation_profile import SpeculationProfile
from protocol.requests import Finish, Logprobs, Request


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---- front -> engine -----------------------------------------------------------------------


class Generate(_Message, frozen=True):
    """Compute the context here, then decode. ``expected_tokens``: of the context that a router
    expects to be computed; 0: unknown, all of them."""

    handle: int
    request: Request
    expected_tokens: int = 0


class Prefill(_Message, frozen=True):
    """Compute the context, draw one token, offer the KV, and hold the pages until ``Drop``.
    ``expected_tokens``: as for ``Generate``."""

    handle: int
    request: Request
    frame_bytes: int
    codec: Codec
    expected_tokens: int = 0


class Export(_Message, frozen=True):
    """Offer the KV of the context's cached full blocks, without computing anything, and hold them
    until ``Drop``. Answered by ``Started``."""

    handle: int
    request: Request
    frame_bytes: int
    codec: Codec


class Import(_Message, frozen=True):
    """Allocate idle pages for the full blocks of the context that are not cached. Answered by
    ``ImportStarted``, and later by ``ImportEnded`` for any reason of its end."""

    handle: int
    request: Request


class EndImport(_Message, frozen=True):
    """No further frame of this import will come: cache its completely received blocks, once the
    ``frames`` frames that ``Ingest`` gave have been written."""

    handle: int
    frames: int


class Receive(_Message, frozen=True):
    """Expect the KV of the context from another worker, and look up which prefix is cached here.
    Answered by ``PrefixFound``."""

    handle: int
    request: Request


class Reserve(_Message, frozen=True):
    """Queue for the pages of the missing blocks. Answered by ``Reserved``."""

    handle: int


class Join(_Message, frozen=True):
    """Decode from ``token`` on, the first output, once ``frames`` frames have been written: all
    that ``Ingest`` gave for this sequence, in any order."""

    handle: int
    token: int
    frames: int


class Drop(_Message, frozen=True):
    """Forget the sequence and free its pages at once."""

    handle: int


class TakeRole(_Message, frozen=True):
    """Plan with the policy of this role from the next step on; running sequences continue."""

    role: str


Command: TypeAlias = (
    Generate | Prefill | Export | Import | EndImport | Receive | Reserve | Join | Drop | TakeRole
)


# ---- front -> copy thread of the engine ----------------------------------------------------


class Skip(_Message, frozen=True):
    """Leave the first ``blocks`` blocks of this prefill or export out. It comes before ``Grant``,
    and not at all where nothing is left out."""

    handle: int
    blocks: int


class Grant(_Message, frozen=True):
    """Allow ``frames`` more frames of this prefill or export to be put into slots."""

    handle: int
    frames: int


class EndOffer(_Message, frozen=True):
    """The last slot command about this prefill or export: fill no further slot for it."""

    handle: int


class Ingest(_Message, frozen=True):
    """Write the frame in ``slot`` to the pages of a sequence, then free the slot.

    ``arena`` 0 is the arena of this engine, whose frames the front has checked; ``SlotsFree``
    answers. Another one is an arena of ``MapArena``: the engine checks that the slot still has the
    ``generation`` and that its bytes have the ``checksum``; ``SlotRead`` answers, and
    ``ReceiveFailed`` before it when a check fails."""

    handle: int
    sequence: int
    slot: int
    piece: KVPiece
    nbytes: int
    codec: Codec
    arena: int = 0
    generation: int = 0
    checksum: int = 0  # of the payload, as in ``KVFrame``


class SlotsFree(_Message, frozen=True):
    """The receiver of these slots has emptied them. Both sides send it."""

    slots: list[int]


class MapArena(_Message, frozen=True):
    """Map another worker's arena for reading. Its descriptor comes with this message, as ancillary
    data of the same socket; ``arena`` is a number that the front has drawn, not 0."""

    arena: int
    slot_bytes: int
    slots: int


class UnmapArena(_Message, frozen=True):
    """Forget an arena of ``MapArena``; a frame that is being read from it is read to its end."""

    arena: int


SlotCommand: TypeAlias = (
    Skip | Grant | EndOffer | Ingest | SlotsFree | MapArena | UnmapArena | pair_messages.PairCommand
)


# ---- engine -> front -----------------------------------------------------------------------


class Progress(_Message, frozen=True):
    """The engine is loading: what is being done, and which fraction of it is done."""

    what: str
    fraction: float


class EngineReady(_Message, frozen=True):
    """The engine takes commands."""

    fingerprint: str  # of the model
    vocab_size: int
    max_model_len: int
    kv: KVFormat
    kv_tokens: int
    step_seconds: float  # the longest step of the warm-up
    speculation: str = "off"  # the proposer, or why there is none
    ceilings: MachineCeilings = MachineCeilings()
    element_bytes: int = 4  # per weight
    gpu: bool = False
    max_batch: int = 0  # sequences in a step; 0: unknown
    prefill_chunk: int = 0  # prompt tokens in a step; 0: unknown
    copy_costs: CopyCosts = CopyCosts()

    @property
    def kv_identity(self) -> str:
        """Workers with the same identity can read each other's KV."""
        return f"{self.fingerprint}/{self.kv.precision}/{LAYOUT_VERSION}"


class EngineFailed(_Message, frozen=True):
    """The engine cannot start or go on, and ends; ``why`` is written for the operator."""

    why: str


class RequestRefused(_Message, frozen=True):
    """The engine does not take this request: its field ``param`` is wrong, or it is busy."""

    handle: int
    why: str
    param: str  # empty: no particular field
    code: str = ""
    busy: bool = False  # another engine may take it


class Expired(_Message, frozen=True):
    """A deadline of the request has passed. The engine has dropped its sequence."""

    handle: int


class PromptLogprobs(_Message, frozen=True):
    """Log-probabilities of the prompt from its second token on, sent before the first output."""

    handle: int
    logprobs: list[Logprobs]


class PrefixFound(_Message, frozen=True):
    """The look-up found ``cached_tokens`` leading tokens of the context in the cache."""

    handle: int
    cached_tokens: int


class Reserved(_Message, frozen=True):
    """The pages are allocated: KV may come."""

    handle: int


class ImportStarted(_Message, frozen=True):
    """The import holds ``cached_blocks`` cached leading blocks, and pages for ``blocks`` in all."""

    handle: int
    cached_blocks: int
    blocks: int


class ImportEnded(_Message, frozen=True):
    """The import has ended, on request or because another sequence needs its pages.
    ``cached_tokens`` leading tokens are cached now."""

    handle: int
    cached_tokens: int


class ReceiveFailed(_Message, frozen=True):
    """The KV cannot be received as planned: the front must drop the sequence and place the request
    again."""

    handle: int
    why: str
    by_carrier: bool = False  # no frame was wrong: another worker's arena cannot be read


class Started(_Message, frozen=True):
    """The prefill was admitted, and its pages are allocated."""

    handle: int
    cached_tokens: int


class Joined(_Message, frozen=True):
    """A sequence with KV from another worker decodes from this step on."""

    handle: int


class KVFrame(_Message, frozen=True):
    """KV of a prefill lies in ``slot``; no further frame follows the ``last`` one."""

    handle: int
    sequence: int
    slot: int
    piece: KVPiece
    nbytes: int
    last: bool
    generation: int = 0  # of the slot's content
    checksum: int = 0  # XXH3 (64 bits) of the payload


class Computed(_Message, frozen=True):
    """``tokens`` leading tokens of a prefill's context have been computed, in a step that was not
    its last one."""

    handle: int
    tokens: int


class SlotRead(_Message, frozen=True):
    """Frame ``sequence`` of the transfer into ``handle`` was read from another worker's arena, or
    is no longer needed: its slot may be filled anew."""

    handle: int
    sequence: int


class TokensDrawn(_Message, frozen=True):
    """The tokens of one step, as parallel lists. ``logprobs`` is empty if no request wants any."""

    handles: list[int]
    tokens: list[int]
    finishes: list[Finish]
    logprobs: list[Logprobs | None] = []


class CacheChanged(_Message, frozen=True):
    """Blocks stored in the prefix cache (True) and evicted (False), in order, as runs of packed
    block keys. A block is stored after its parent and evicted before it."""

    changes: list[tuple[bool, bytes]]


class EngineBeat(_Message, frozen=True):
    """The engine's sign of life, with its load: sent about every BEAT_S, and LEAST_BEAT_S after the
    last one if the load has changed."""

    running: int
    waiting: int
    queued_tokens: int
    pages_free: int
    step_model: tuple[float, ...] = ()  # a fitted StepModel
    counters: EngineCounters = msgspec.field(default_factory=EngineCounters)
    speculation: SpeculationStatus = SpeculationStatus()
    outbound_slots_held: int = 0
    queued_prompts: int = 0  # that ``queued_tokens`` are of
    computed_tokens: int = 0  # of these prompts, already computed
    prompts_taken: int = 0  # Generate and Prefill commands so far
    profile: SpeculationProfile | None = None  # None: nothing drafts


Event: TypeAlias = (
    Progress
    | EngineReady
    | EngineFailed
    | RequestRefused
    | Expired
    | PromptLogprobs
    | PrefixFound
    | Reserved
    | ImportStarted
    | ImportEnded
    | ReceiveFailed
    | Started
    | Joined
    | KVFrame
    | Computed
    | SlotRead
    | SlotsFree
    | TokensDrawn
    | CacheChanged
    | EngineBeat
    | pair_messages.PairEvent
)

BEAT_S = 0.5
LEAST_BEAT_S = 0.02
