"""The words by which a rank's kernels and its host tell each other that another rank did not
answer. All kernels on the rank's device that wait for other ranks share them. This file knows no
regions.
"""

import torch
from torch import Tensor


class Faults:
    """Two words that are 0 while all ranks answer: `device`, int32 `[1]`, and `host`, the same in
    memory that both device and host see."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self.device = torch.zeros(1, dtype=torch.int32, device=device)

    @classmethod
    def on(cls, device: torch.device) -> "Faults":
        """Makes the fault words of the rank that has this GPU."""
        return cls(torch.zeros(1, dtype=torch.int32, pin_memory=True), device)

    def call_off(self) -> None:
        """Ends the kernels that wait on the device. Any thread may call it."""
        self.host.fill_(1)

    def check(self) -> None:
        """Raises RuntimeError if a rank did not answer in time. Call it before results are used."""
        if int(self.host[0]):
            raise RuntimeError(
                "a rank of this engine did not answer in time: the results of this step are not "
                "valid"
            )
