"""The messages between processes, as msgspec types: router <-> worker, and the content of a
hand-off ticket.

Torch-free, and imports no other room: the router knows of the engine only what is defined here.
Knows no sockets: `worker.engine_client` and `cluster` carry the bytes. The router's record is the
only authority on a request's tokens. So every message about a request carries its `RequestKey`, and
messages of an older attempt are dropped.

    router --Command--> worker        Submit, Prepare, Cancel, ConnectPeer, DisconnectPeer,
                                      Subscribe, Resync, RouterLost, SetRole
    replica --Command--> engine       the same, and Stop

    worker --EventBatch--> router     Hello, Delta, PromptScored, Embedded, Handoff, Arrived,
                                      Failed, PeerStatus, LegsWaiting, Snapshot, Load, CacheChange,
                                      CacheState, PoolChange
"""
