"""`python -m benchmarks.peers.nvflare_splitnn`: measure once, print one line of JSON."""

import argparse
import json
from dataclasses import asdict

from benchmarks.peers.nvflare_splitnn.measure import measure_splitnn

parser = argparse.ArgumentParser(description="Training steps per second of NVFlare's SplitNN on loopback.")
parser.add_argument(
    "--seconds", type=float, default=10.0, help="measured time for each way of passing arrays"
)
print(json.dumps(asdict(measure_splitnn(parser.parse_args().seconds))))
