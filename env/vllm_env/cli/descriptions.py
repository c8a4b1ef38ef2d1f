"""What the help says of the build and of each subcommand.

The first sentence of a description is the subcommand's line in the help.
"""

from vllm_env.base.command import COMMAND

BUILDS = """\
Builds a Triton model repository with the vLLM that you pin. It packs vLLM with
conda-pack, adds the stub that fits, and then serves the model once and asks it
(the smoke run). Without an argument, it builds the default profile of
env/vllm_env.toml.
"""
EXAMPLES = f"""\
Examples:
  {f"{COMMAND} --dry-run":<37}  what a build would do and download
  {f"{COMMAND} --vllm 0.32.0":<37}  a model with this release
  {COMMAND} --profile cuda --triton-release 26.07
                                         for GPUs, and for Triton 26.07
"""
ADOPTS = """\
Makes a model from SOURCE, a model folder of Triton's own vLLM backend. SOURCE
is only read, and keeps the weights.
"""
FILLS = """\
Fills DIR with all that a build downloads, for machines without network. There,
give --offline --wheelhouse DIR. It takes the options of the build. Those that
decide about no download change nothing here.
"""
UNPACKS = """\
Unpacks the whole environment of a built model into DIR. DIR must be missing or empty. The
environment is the same for all layouts, and works in any place: for the workers of Ray, for
example.
"""
EXPORTS = """\
Writes built models as an OCI image for a registry. Kubernetes and podman mount it next to Triton's
own container, which finds each model at models/NAME, unpacked. Weights and caches stay out of it.
"""
CLEANS = """\
Removes what killed builds and dead servers left, and the cache. Running servers keep theirs.
"""
SERVES = """\
Starts this machine's Triton on a model repository. Options of tritonserver go after two dashes, as
in: serve -- --http-port=8100
"""
ASKS = """\
Asks a served model, and measures it. It takes the options of client/client.py.
"""
