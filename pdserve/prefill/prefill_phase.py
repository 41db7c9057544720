"""Runs a worker's prefill phase: compute a prompt, publish its blocks, and keep them pinned until D
has them.

Knows the engine and a KVSender; no decode phase, no sockets and no routers. Driven by worker.loop
on its one thread.

    COMPUTING --a step is complete--> its full blocks are offered to whoever follows the prompt
    COMPUTING --its last step is complete--> PUBLISHED --done | rejected | expired--> blocks free

A cancel frees the blocks in any state. Over the pin budget, the oldest ticket is revoked. Its
blocks become plain cached blocks, which D may still read while their generations match.
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
    """Publishes the prompts of one worker.

    `max_pinned_blocks` is the budget of blocks under tickets in each home; a single ticket may
    exceed it. `compute_here` gives a request to the engine.
    """

    def __init__(
        self, engine: Engine, sender: KVSender, max_pinned_blocks: int, compute_here: ComputeHere
    ) -> None:
        self._engine = engine
        self._compute_here = compute_here
        self._sender = sender
        self._max_pinned = max_pinned_blocks
        self._published: OrderedDict[RequestKey, HeldPrompt] = OrderedDict()
        self._computing: set[RequestKey] = set()  # prompts of which parts were published
        self.num_revoked = 0

    @property
    def num_pinned_blocks(self) -> int:
        return sum(len(held.block_ids) for held in self._published.values())

    def submit(self, submit: Submit, grammar: Grammar | None = None) -> None:
        """Queues the prompt. Raises ValueError if it can never run here.

        For `grammar` see `Engine.make_request`.
        """
        self._compute_here(self._engine.make_request(submit, grammar), submit.starts)

    def on_step(self, result: StepResult) -> list[tuple[RequestKey, Event]]:
        """Publishes what this step wrote: the step is complete on the device. Returns the
        hand-offs."""
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
        """Unpins the blocks that D has finished with, and forgets what was aborted."""
        for unpinned in self._sender.poll():
            if self._published.pop(unpinned.key, None) is not None:
                self._engine.release_held(unpinned.key)
        self._forget_parts()

    def cancel(self, key: RequestKey) -> None:
        """Drops the ticket. Calling it twice is allowed. The engine aborts what is still
        computing."""
        if self._published.pop(key, None) is not None or key in self._computing:
            self._sender.revoke(key)
        self._computing.discard(key)
        self._engine.release_held(key)

    def keys(self) -> set[RequestKey]:
        """Returns the requests whose blocks are kept for a hand-off."""
        return set(self._published)

    def _publish(self, held: HeldPrompt, written_at: float) -> Handoff:
        ticket = self._sender.publish(
            held.key, held.block_ids, held.num_tokens, held.content, written_at, held.home
        )
        self._published[held.key] = held
        self._computing.discard(held.key)
        return Handoff(request_id=held.key.request_id, attempt=held.key.attempt, ticket=ticket)

    def _forget_parts(self) -> None:
        """Revokes the parts of prompts that ended without a hand-off: at their first token, or
        aborted."""
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
