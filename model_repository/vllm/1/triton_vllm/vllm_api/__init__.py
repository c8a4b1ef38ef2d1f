"""The one room that touches vLLM's API; it finds every name that moved between vLLM 0.11 and 0.33.

Whether a vLLM can do something is decided by its attributes, fields and keywords, not by its
version number. Importing this package does not import vLLM, which takes 10 s or more. ``load()``
does.
"""

from __future__ import annotations

from triton_vllm.vllm_api.aligning import Fragment
from triton_vllm.vllm_api.bodies import BodyType
from triton_vllm.vllm_api.engine import (
    ChatDefaults,
    Facts,
    attach,
    compiles_with_xgrammar,
    facts,
    forget_parent,
    frees_memory,
    has_begun,
    is_dead,
    sample_once,
    start,
    xgrammar_tokenizer,
)
from triton_vllm.vllm_api.fields import (
    Schema,
    engine_arg_types,
    pooling_types,
    request_keywords,
    sampling_schema,
)
from triton_vllm.vllm_api.instances import connect, lacking, launch, note_statistics
from triton_vllm.vllm_api.log_probabilities import forget_texts
from triton_vllm.vllm_api.names import Vllm, load
from triton_vllm.vllm_api.node import run_node
from triton_vllm.vllm_api.openai import (
    Application,
    OpenAiError,
    as_vllms,
    build_application,
    ends_generate,
    server_arg_types,
    server_args,
    status_of,
)
from triton_vllm.vllm_api.parsers import (
    Conversation,
    ParserError,
    ParserNames,
    Parsers,
    Piece,
    Reader,
    check_parsers,
    has_parsers,
)
from triton_vllm.vllm_api.platform import (
    child_environment,
    devices_compute,
    limit_threads,
    prometheus_families,
    runs_on_cpu,
    supports_ray,
    variables,
)
from triton_vllm.vllm_api.prompts import (
    has_tekken,
    media_loaders,
    parse_prompt,
    pooled_tokenizer,
    render_chat,
    renderer,
)
from triton_vllm.vllm_api.refusals import is_refusal, too_large
from triton_vllm.vllm_api.scoring import RenderPair, pair_renderer
