"""What a worker does in the prefill phase: compute a prompt, publish its blocks, keep them pinned
until D has them.

Knows the engine and a KVSender; nothing of the decode phase, of sockets or of routers. Driven by
worker.loop on its one thread.

    COMPUTING --a step is complete--> its full blocks are told to whoever follows the prompt
    COMPUTING --its last step is complete--> PUBLISHED --done | rejected | expired--> blocks free
        cancel frees the blocks in any state; over the pin budget the oldest ticket is revoked: its
        blocks become plain cached blocks, which D may still read as long as their generations match
"""

from collections import OrderedDict

from pdserve.engine.engine import Engine
from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.scheduling.sequence import ComputeHere
from pdserve.engine.step_result import HeldPrompt, StepResult
from pdserve.kvtransfer.connector import KVSender
from pdserve.protocol.commands import Submit
from pdserve.protocol.events import Event, Handoff
from pdserve.protocol.request_key import RequestKey


class PrefillPhase:
    """max_pinned_blocks: budget of blocks under tickets in each home; a single ticket may exceed
    it. compute_here: gives a request to the engine.
    """

    def __init__(
        self, engine: Engine, sender: KVSender, max_pinned_blocks: int, compute_here: ComputeHere
    ) -> None:
        self._engine = engine
        self._compute_here = compute_here
        self._sender = sender
        self._max_pinned = max_pinned_blocks
        self._published: OrderedDict[RequestKey, HeldPrompt] = OrderedDict()
        self._computing: set[RequestKey] = set()  # of which parts were published
        self.num_revoked = 0

    @property
    def num_pinned_blocks(self) -> int:
        return sum(len(held.block_ids) for held in self._published.values())

    def submit(self, submit: Submit, grammar: Grammar | None = None) -> None:
        """Queue the prompt; ValueError when it can never run here. grammar: see
        `Engine.make_request`."""
        self._compute_here(self._engine.make_request(submit, grammar), submit.starts)

    def on_step(self, result: StepResult) -> list[tuple[RequestKey, Event]]:
        """Publish what this step wrote: it is complete on the device. Returns the hand-offs."""
        events: list[tuple[RequestKey, Event]] = [
            (held.key, self._publish(held, result.ended_at)) for held in result.held
        ]
        whole = {held.key for held in result.held}
        for part in result.written:
            if part.key not in whole and self._engine.knows(part.key):
                self._sender.publish_part(
                    part.key, part.block_ids, part.content, result.ended_at, part.home
                )
                self._computing.add(part.key)
        self._keep_budget()
        return events

    def poll(self) -> None:
        """Unpin what D is done with, and forget what was aborted."""
        for unpinned in self._sender.poll():
            if self._published.pop(unpinned.key, None) is not None:
                self._engine.release_held(unpinned.key)
        self._forget_parts()

    def cancel(self, key: RequestKey) -> None:
        """Drop the ticket; idempotent. (The engine aborts what is still computing.)"""
        if self._published.pop(key, None) is not None or key in self._computing:
            self._sender.revoke(key)
        self._computing.discard(key)
        self._engine.release_held(key)

    def keys(self) -> set[RequestKey]:
        """Requests whose blocks are kept for a hand-off."""
        return set(self._published)

    def _publish(self, held: HeldPrompt, written_at: float) -> Handoff:
        ticket = self._sender.publish(
            held.key, held.block_ids, held.num_tokens, held.content, written_at, held.home
        )
        self._published[held.key] = held
        self._computing.discard(held.key)
        return Handoff(request_id=held.key.request_id, attempt=held.key.attempt, ticket=ticket)

    def _forget_parts(self) -> None:
        """Of prompts that ended without a hand-off: at their first token, or aborted."""
        for key in [key for key in self._computing if not self._engine.knows(key)]:
            self._sender.revoke(key)
            self._computing.discard(key)

    def _keep_budget(self) -> None:
        for home in range(len(self._engine.homes)):
            held = [held for held in self._published.values() if held.home == home]
            pinned = sum(len(each.block_ids) for each in held)
            while len(held) > 1 and pinned > self._max_pinned:
                oldest = held.pop(0)
                pinned -= len(oldest.block_ids)
                self.cancel(oldest.key)
                self.num_revoked += 1
