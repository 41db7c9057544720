"""Counters of hand-offs (pulls, tickets and parts), in a registry that the caller owns and exposes.

Made by `kvtransfer.build`; updated by the receivers and the sender.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram


class TransferMetrics:
    """Metrics of hand-offs. The outcome of a transfer is "done" or the reason of its PullFailed.
    The event of a ticket is published, done, rejected, expired or revoked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.transfers = Counter(
            "pdserve_kv_transfers",
            "Pulls by how they ended.",
            ["transport", "outcome"],
            registry=registry,
        )
        self.bytes = Counter(
            "pdserve_kv_transfer_bytes",
            "Bytes of finished pulls.",
            ["transport"],
            registry=registry,
        )
        self.sizes = Histogram(
            "pdserve_kv_transfer_size_bytes",
            "Bytes of one finished pull.",
            buckets=tuple(float(1 << power) for power in range(14, 35, 2)),
            registry=registry,
        )
        self.early_bytes = Counter(
            "pdserve_kv_transfer_early_bytes",
            "Bytes of finished pulls that were here before the prompt was complete.",
            registry=registry,
        )
        self.descriptors = Counter(
            "pdserve_kv_transfer_descriptors",
            "Descriptors of finished pulls, neighbours merged.",
            ["transport"],
            registry=registry,
        )
        self.seconds = Histogram(
            "pdserve_kv_transfer_seconds",
            "Seconds from the complete ticket to the verified end of a pull.",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=registry,
        )
        self.unsettled = Counter(
            "pdserve_kv_transfers_unsettled",
            "Pulls given up while bytes could still land.",
            registry=registry,
        )
        self.tickets = Counter(
            "pdserve_kv_tickets", "Tickets by event.", ["event"], registry=registry
        )
        self.parts = Counter(
            "pdserve_kv_parts", "Parts of prompts published before their end.", registry=registry
        )
