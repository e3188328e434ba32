"""What a process loads before it begins: no more than its job needs."""

import subprocess
import sys

PROGRAM = """
import sys
def loaded(*names):
    return [name for name in names if name in sys.modules]
import vafl.commands.align
vafl.Config()
print(loaded("torch", "scipy", "sklearn", "pandas", "matplotlib"))
import vafl.federation.up, vafl.federation.client, vafl.launch
print(loaded("scipy", "sklearn", "pandas", "matplotlib"))
"""


def test_an_alignment_needs_no_torch_and_a_run_draws_last():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["[]", "[]", ""]
