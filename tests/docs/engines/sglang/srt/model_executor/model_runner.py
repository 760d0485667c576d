"""What a backend of SGLang finds in its runner."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ReqToTokenPool:
    #: The slot of each token of each request, (requests, tokens), int32.
    req_to_token: torch.Tensor


@dataclass
class ModelRunner:
    req_to_token_pool: ReqToTokenPool
    page_size: int
