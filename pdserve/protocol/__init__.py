"""The messages between processes, as msgspec types: router <-> worker, and what a hand-off ticket
holds.

Torch-free, and imports no other room: the router knows of the engine only what stands here. Knows
no sockets: who carries the bytes is `worker.engine_client` and `cluster`. One rule rules them all:
the router's record is the only authority on a request's tokens, so every message about a request
carries its `RequestKey`, and messages of an older attempt are dropped.

    router --Command--> worker        Submit, Prepare, Cancel, ConnectPeer, DisconnectPeer,
                                      Subscribe, Resync, RouterLost, SetRole
    worker --EventBatch--> router     Hello, Delta, PromptScored, Handoff, Arrived, Failed,
                                      PeerStatus, LegsWaiting, Snapshot, CacheChange, CacheState,
                                      PoolChange
"""
