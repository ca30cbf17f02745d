"""Weights that are the same in every run, whichever thread draws them first."""

import torch
from torch import nn


def seeded(module, seed):
    """Draw a module's parameters anew from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return module
