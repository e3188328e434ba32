"""Run the job with two sites in NVFlare's simulator and environment, as its SplitNN example does."""

import argparse
import signal
from pathlib import Path

from nvflare.collab import CollabRecipe
from nvflare.recipe import SimEnv
from parties import Coordinator, Party


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("limit", type=int)
    chosen = parser.parse_args()
    signal.alarm(chosen.limit)
    recipe = CollabRecipe(job_name="splitnn", server=Coordinator(), client=Party(), min_clients=2)
    recipe.set_server_prop("result", str(chosen.folder / "result.json"))
    recipe.set_server_prop("seconds", chosen.seconds)
    recipe.set_server_prop("limit", chosen.limit)
    recipe.set_client_prop("limit", chosen.limit)
    sites = SimEnv(num_clients=2, workspace_root=str(chosen.folder), log_config="ERROR")
    recipe.execute(sites)


if __name__ == "__main__":
    main()
