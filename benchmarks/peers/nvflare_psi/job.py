"""Run NVFlare's DH-PSI recipe with two sites in its simulator. This runs in NVFlare's environment."""

import argparse
import signal
from pathlib import Path

from nvflare.app_common.psi.recipes.dh_psi import DhPSIRecipe
from nvflare.recipe import SimEnv
from sets import Ids


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("ids", type=int)
    parser.add_argument("limit", type=int)
    chosen = parser.parse_args()
    signal.alarm(chosen.limit)
    recipe = DhPSIRecipe(min_clients=2, local_psi=Ids(chosen.ids, str(chosen.folder / "marks.txt")))
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(chosen.folder), log_config="ERROR"))


if __name__ == "__main__":
    main()
