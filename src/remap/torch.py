"""`import remap.torch`: a second name of the module behind the attribute `remap.torch`, for those who import it."""

from __future__ import annotations

import sys

from remap.integrations import torch

sys.modules[__name__] = torch
