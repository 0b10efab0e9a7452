"""For all tests: a generated example may take as long as a busy machine needs."""

import os

import torch
from hypothesis import settings

settings.register_profile("anabranch", deadline=None)
settings.load_profile("anabranch")

# Our kernels run on the CPU, interpreted, where there is no GPU: said before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
