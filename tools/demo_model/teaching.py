"""What the network is taught beside its answers, and what is thrown away afterwards.

Left alone, the recurrent layers learn to look up first, well enough at short distances, and attention, which could do
it at any distance, never begins. So attention is shown where to look: at what was last said of the same thing. And what
enters it is made to tell who and what a value belongs to, so that looking is a matter of comparing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from network import Network, Seen
from pointers import Pointer, Pointers
from rendering import Encoder
from torch import Tensor, nn

__all__ = ["Teacher", "shares"]


class Teacher(nn.Module):
    """Linear classifiers of what each attention reads, and a loss.

    ``pointed`` is how much of the last pass's attention lay where it should, 0 to 1, the mean of pointers and layers.
    """

    def __init__(self, network: Network, encoder: Encoder) -> None:
        super().__init__()
        self._network = (network,)  # not a part of the teacher
        self._pointers = Pointers(encoder)
        classes = [sorted(self._pointers.names), sorted(self._pointers.attributes)]
        self._class_of = torch.zeros(network.config["vocab_size"], dtype=torch.long)
        for ids in classes:
            self._class_of[ids] = torch.arange(len(ids))
        hidden = network.config["hidden_size"]
        # For each attention: who and what, where a value is due and where it stands.
        self.classifiers = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, len(ids)) for _ in range(2) for ids in classes) for _ in network.attentions
        )
        self.pointed = 0.0

    def loss(self, ids: Tensor) -> Tensor:
        """Of the network's last pass, which was over int64 tokens ``[B, T]``."""
        (network,) = self._network
        pointers = [self._pointers(row) for row in ids.tolist()]
        facts = [(row, pointer) for row, found in enumerate(pointers) for pointer in found if pointer.key is not None]
        at = torch.tensor([row * ids.shape[1] + pointer.at for row, pointer in facts], dtype=torch.long)
        keys = self._class_of[torch.tensor([pointer.key for _, pointer in facts], dtype=torch.long).view(-1, 2)]
        looked, read = [], []
        for attention, classifiers in zip(network.attentions, self.classifiers, strict=True):
            assert attention.seen is not None
            looked.append(shares(attention.seen, pointers))
            x = attention.seen.x.flatten(0, 1)
            for place, (who, what) in zip((at, at + 1), (classifiers[:2], classifiers[2:]), strict=True):
                read += [F.cross_entropy(who(x[place]), keys[:, 0]), F.cross_entropy(what(x[place]), keys[:, 1])]
        logarithms = torch.cat(looked)
        self.pointed = logarithms.detach().exp().mean().item()
        return torch.stack(read).mean() - logarithms.mean()


def shares(seen: Seen, pointers: Sequence[Sequence[Pointer]]) -> Tensor:
    """For each pointer of each sequence and one query head of each key head the logarithm of the share of its attention
    that lies on the pointer's sources, ``[m]``."""
    _, q, k = seen
    length, teachable = k.shape[2], q[:, :: q.shape[1] // k.shape[1]] * q.shape[-1] ** -0.5
    found = []
    for row, row_pointers in enumerate(pointers):
        at = torch.tensor([pointer.at for pointer in row_pointers], dtype=torch.long)
        elsewhere = torch.ones(len(row_pointers), length, dtype=torch.bool)
        for n, pointer in enumerate(row_pointers):
            elsewhere[n, list(pointer.sources)] = False
        scores = teachable[row, :, at] @ k[row].transpose(-1, -2)
        scores = scores.masked_fill(torch.arange(length) > at.unsqueeze(1), -torch.inf)
        found.append((scores.masked_fill(elsewhere, -torch.inf).logsumexp(-1) - scores.logsumexp(-1)).flatten())
    return torch.cat(found)
