"""An agent's line to the controller of its job, which outlives the controller."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from pathlib import Path

import msgspec

from keepstep import __version__
from keepstep.errors import EnvironmentProblem, KeepstepError, MembershipError, PeerLost
from keepstep.records.messages import Assignment, Enlist, Fact, MemberStopped, PathsReady, StateDigest, Stop
from keepstep.records.path_messages import PathsCounted, PathsProbed
from keepstep.records.watch_messages import MemberMoves, WatchFact
from keepstep.service.background import background
from keepstep.service.outbox import MOST_KEPT, newer
from keepstep.service.output import Console
from keepstep.service.settings import Settings
from keepstep.store.remote import connect_remote
from keepstep.store.remote_peer import Envelope, RemotePeer

__all__ = ["AgentRequest", "Line", "enlist"]

_AGAIN_S = 0.2
_FIRST_TRY_S, _LONGEST_TRY_S = 1.0, 8.0
_AGENT = secrets.token_hex(8)
"""Names this process, so that a controller knows it again."""
_PASSING = WatchFact | PathsProbed | PathsCounted | PathsReady | StateDigest
"""Facts that the journal does not keep. They get no number: what is numbered and not in the journal would be sent again
to a controller that takes over, and the line keeps only so many."""


class AgentRequest(msgspec.Struct, frozen=True):
    """What a person asked for. `job` empty: the controller's only one; `directory` None: under run_root; `address`
    empty: the one that faces the controller; `labels`: the domains of this node, each KIND=LABEL."""

    controller: str
    node: str
    job: str
    directory: Path | None
    settings: Settings
    address: str = ""
    labels: tuple[str, ...] = ()


async def enlist(peer: RemotePeer, request: AgentRequest, *, orders: int) -> Assignment:
    """Offer this node, or come back with it. Raises MembershipError where the controller refuses, PeerLost where it is
    gone or sends this node away for now: it has a canary, which has its nodes or is over."""
    await peer.send(Envelope(request.node, "", Enlist(request.node, request.job, __version__, orders, _AGENT)))
    answer = (await peer.receive()).message
    if isinstance(answer, Stop):
        raise _refusal(answer)
    if not isinstance(answer, Assignment):
        raise MembershipError("the controller did not assign a job", where=request.controller)
    return answer


def _refusal(answer: Stop) -> KeepstepError:
    if answer.code == 0:
        return PeerLost(f"the controller sends this node away for now: {answer.why}")
    error = MembershipError(f"the controller refused this node: {answer.why}")
    error.exit_code = answer.code
    return error


class Line:
    """The agent's line to its controller, made anew where the controller is replaced or nothing comes through any more:
    no order and no fact that changes something is lost or heard twice. Members train on meanwhile."""

    def __init__(self, request: AgentRequest, *, peer: RemotePeer, token: str) -> None:
        self.console: Console | None = None
        self._request, self._peer, self._token = request, peer, token
        self._said: deque[tuple[int, Envelope]] = deque(maxlen=MOST_KEPT)
        self._count = 0
        self._obeyed = 0
        self._left: set[asyncio.Task[None]] = set()

    def say(self, member: str, fact: Fact) -> None:
        """Send a fact up. While there is no controller it is kept, unless its loss does not matter."""
        number = 0
        if isinstance(fact, MemberMoves):
            self._take_back(fact)
        if not isinstance(fact, _PASSING):
            self._count += 1
            number = self._count
        envelope = Envelope(self._request.node, member, fact, number)
        if number:
            self._said.append((number, envelope))
        with contextlib.suppress(PeerLost):  # noticed by the reader, which makes the line anew
            self._peer.post(envelope)

    def _take_back(self, fact: MemberMoves) -> None:
        """A controller that has not heard of a stop yet need not lose a member for it that runs again."""
        for index, (number, envelope) in enumerate(self._said):
            said = envelope.message
            if isinstance(said, MemberStopped) and said.member == fact.member:
                self._said[index] = (number, msgspec.structs.replace(envelope, message=fact))

    async def next_order(self) -> Envelope:
        """The next order. Raises EnvironmentProblem where no controller comes back in time."""
        while True:
            try:
                envelope = await self._heard()
            except PeerLost:
                await self._come_back()
                continue
            if envelope.number and envelope.number <= self._obeyed:
                continue
            self._obeyed = max(self._obeyed, envelope.number)
            return envelope

    async def _heard(self) -> Envelope:
        """The next envelope. Raises PeerLost where the link has ended, or nothing comes over it any more: by then the
        controller has waited for half of the time after which it gives this node up."""
        look_s = self._request.settings.silence_s / 4
        while True:
            try:
                async with asyncio.timeout(look_s):
                    return await self._peer.receive()
            except TimeoutError:
                if not await self._peer.answers(look_s):
                    raise PeerLost("nothing comes over the link", where=self._peer.where) from None

    async def close(self) -> None:
        """Hang up."""
        await self._peer.close()

    async def _come_back(self) -> None:
        """Find the controller, or the one that took over. A way may swallow what it is given, so a try is short at
        first; the next one leaves from another port. Raises EnvironmentProblem when patience ends, MembershipError
        where it refuses."""
        patience_s = self._request.settings.controller_patience_s
        if self.console is not None:
            what = "the controller does not answer"
            self.console.say(f"keepstep: {what}; {patience_s:g} s for it or another one", error=True)
        try:
            async with asyncio.timeout(patience_s):
                lasts = _FIRST_TRY_S
                while not await self._called(lasts):
                    lasts = min(2 * lasts, _LONGEST_TRY_S)
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError as error:
            raise EnvironmentProblem(
                "the controller is gone; all processes of this node are ended",
                where=self._peer.where,
                remedy="start the job again: it goes on from its newest checkpoint; `keepstep resume DIR` at the "
                "controller, in time, would have taken it over (controller_patience_s)",
            ) from error

    async def _called(self, timeout_s: float) -> bool:
        """One try to reach a controller and to come to the same state with it."""
        try:
            silence_s = self._request.settings.silence_s
            peer = await connect_remote(
                self._request.controller, token=self._token, timeout_s=timeout_s, silence_s=silence_s
            )
        except (EnvironmentProblem, MembershipError):  # nobody, or something else at its address for now
            return False
        try:
            known = await enlist(peer, self._request, orders=self._obeyed)
            for envelope in newer(list(self._said), known.facts):
                peer.post(envelope)
        except PeerLost:
            await peer.close()
            return False
        except KeepstepError:
            await peer.close()
            raise
        old, self._peer = self._peer, peer  # no waiting between this and the facts above
        task = background(old.close())  # not before: a controller that hears its end takes the node for lost
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        return True
