"""How the user types this program. Messages, remedies and the help name it so.

A checkout has ``gen_vllm_env.sh``, an installed wheel the command ``vllm-env``. What a build writes
names neither: the same lock must give the same bytes from both.
"""

from pathlib import Path

# A wheel contains the files that it needs of the checkout.
PACKED_CHECKOUT = Path(__file__).resolve().parents[1] / "checkout"
IS_WHEEL = PACKED_CHECKOUT.is_dir()
"""Whether this is an installed wheel."""
COMMAND = "vllm-env" if IS_WHEEL else "./gen_vllm_env.sh"
"""The program in a command of a message."""
PROGRAM = COMMAND.removeprefix("./")
"""The program's name."""
