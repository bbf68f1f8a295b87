"""What a decode worker says of one request, into its mailbox. The worker is not trusted."""

from __future__ import annotations

from typing import NamedTuple

from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest
from protocol.logprobs import all_from_wire
from protocol.request import Finish
from router.mailbox import Mailbox, Trouble


class Flight(NamedTuple):
    """A request that a worker has, and the log-probabilities that it asked for."""

    mailbox: Mailbox
    logprobs: bool  # beside each token
    prompt: int  # tokens of the prompt that have some: none, or all but the first

    @classmethod
    def of(cls, request: pb.Request, mailbox: Mailbox) -> Flight:
        asked = request.sampling.HasField("prompt_logprobs") and not request.emitted
        return cls(
            mailbox,
            request.sampling.HasField("logprobs"),
            len(request.prompt) - 1 if asked else 0,
        )


def deliver(output: pb.Output, flight: Flight) -> bool:
    """Put ``output`` into its mailbox. False: nothing more is wanted of the worker."""
    mailbox = flight.mailbox
    if output.tokens and mailbox.cached_tokens is None:
        mailbox.cached_tokens = output.cached_tokens  # later attempts find what it computed
    if output.timeline:
        mailbox.timeline = {mark.event: mark.seconds for mark in output.timeline}
    if output.HasField("measured"):
        mailbox.measured = output.measured
    mailbox.deaths += output.deaths
    try:
        came = output.prompt_logprobs
        prompt = all_from_wire(came, flight.prompt if came else 0)
        logprobs = all_from_wire(output.logprobs, len(output.tokens) if flight.logprobs else 0)
    except InvalidRequest as error:
        mailbox.fail(Trouble.RETRYABLE, f"the worker's answer cannot be read: {error}")
        return False
    mailbox.prompt_logprobs = prompt or mailbox.prompt_logprobs
    known = output.finish in (pb.FINISH_STOP, pb.FINISH_LENGTH)
    finish = Finish(output.finish) if known else Finish.NONE
    if not mailbox.put(output.tokens, finish, logprobs):
        mailbox.fail(Trouble.OVERFLOW, "the client reads too slowly")
        return False
    if not known and output.finish != pb.FINISH_NONE:
        _fail(output, mailbox)
    return True


def _fail(output: pb.Output, mailbox: Mailbox) -> None:
    why = output.error or "the worker gave no reason"
    if output.HasField("invalid"):
        param, code = output.invalid.param or None, output.invalid.code or None
        return mailbox.fail(Trouble.INVALID, why, InvalidRequest(why, param, code))
    mendable = Trouble.MOVED if output.moved else Trouble.RETRYABLE
    fatal = output.finish == pb.FINISH_ERROR and not output.retryable
    return mailbox.fail(Trouble.FATAL if fatal else mendable, why)
