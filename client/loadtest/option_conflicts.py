"""Options of the client that do not fit together."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def refuse_conflicts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with a message if options do not fit together.

    Raises:
        SystemExit: two do not fit together. The exit status is 2.
    """
    uses_prompts = options.input_prompts or options.prompts or options.iterations is not None
    # os.path returns False for a text that cannot be a name; Path.is_file() raises.
    files = [name for name in options.prompts if os.path.isfile(name)]  # noqa: PTH113
    made_up = options.random_input_len is not None
    goals = {name for name, _ in options.goodput}
    certificates = (options.root_certificates, options.private_key, options.certificate_chain)
    # Each is a condition, and the message if it is true.
    conflicts = (
        (
            options.iterations is not None and options.num_prompts is not None,
            "give either --iterations or --num-prompts",
        ),
        (
            not made_up and (options.random_output_len or options.random_prefix_len),
            "--random-output-len and --random-prefix-len need --random-input-len",
        ),
        (
            options.prompts and options.input_prompts is not None,
            "give the prompts either on the command line or with --input-prompts",
        ),
        (
            files,
            f"{', '.join(files)} is a file; name a file of prompts with --input-prompts",
        ),
        (
            any(not prompt.strip() for prompt in options.prompts),
            "a prompt on the command line is empty; write text, or leave it out",
        ),
        (
            made_up and uses_prompts,
            "--random-input-len makes up the prompts: give --num-prompts instead",
        ),
        (
            options.cancel_rate and not options.streaming_mode,
            "--cancel-rate needs --streaming-mode: it counts the pieces of an answer",
        ),
        (
            options.versus and options.duration,
            "--versus compares equal numbers of requests: give --num-prompts instead",
        ),
        (
            options.burstiness != 1 and options.request_rate == math.inf,
            "--burstiness needs --request-rate",
        ),
        (
            goals & {"ttft", "tpot"} and not options.streaming_mode,
            "goals for ttft and tpot need --streaming-mode: a whole answer has neither",
        ),
        (
            (options.private_key is None) != (options.certificate_chain is None),
            "give --private-key and --certificate-chain together",
        ),
        (any(certificates) and not options.ssl, "certificates need --ssl"),
        (
            not options.versus and (options.versus_backend or options.versus_model),
            "--versus-backend and --versus-model need --versus",
        ),
    )
    for is_conflict, message in conflicts:
        if is_conflict:
            parser.error(message)
