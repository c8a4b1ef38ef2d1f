"""What an environment holds in place of the build's own folder and time, so that equal locks give equal bytes."""

NEUTRAL_PREFIX = "/opt/vllm_env"
"""Replaces the folder of the build; nothing exists there."""

EPOCH = 1_577_836_800
"""Time of every file in an environment, s since 1970 (2020-01-01): bytecode stays valid because Triton restores it."""
