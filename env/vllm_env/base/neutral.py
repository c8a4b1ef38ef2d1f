"""What stands in an environment in place of the build's own folder and time, so that equal locks give equal bytes."""

NEUTRAL_PREFIX = "/opt/vllm_env"
"""Stands where a build would leave its own folder; nothing lies there."""

EPOCH = 1_577_836_800
"""Time of every file in an environment, s since 1970 (2020-01-01): bytecode stays valid because Triton restores it."""
