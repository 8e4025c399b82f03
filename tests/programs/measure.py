"""Runs a program and writes torch's peaks: measure.py OUTPUT PROGRAM."""

import json
import os
import runpy
import sys

output, program = sys.argv[1:]
runpy.run_path(program, run_name="__main__")

import torch  # noqa: E402  (the program decides when torch is imported)

stats = torch.cuda.memory_stats()
keys = (
    "requested_bytes.all.peak",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "num_ooms",
)
with open(output, "w") as file:
    json.dump(
        {key: stats[key] for key in keys} | {"backend": torch.cuda.get_allocator_backend()}, file
    )

# Python 3.11 may abort if it exits right after a backward pass, because it ends torch's autograd thread by force.
sys.stdout.flush()
os._exit(0)
