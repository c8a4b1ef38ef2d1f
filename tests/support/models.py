"""Models made for the tests: tiny, in seconds, with the packed environment's torch and transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from support.reference import run_reference
from support.small_fixtures import workspace_in
from vllm_env.base.cache import cache_root
from vllm_env.serve import standin
from vllm_env.serve.standin import Recipe, ensure_standin

LONG_POSITIONS = 65_536
_TRAINER = Path(standin.__file__).parent
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n"
    "{% if message['reasoning'] %}{{ message['reasoning'] }}\n{% endif %}{{ message['content'] }}\n{% endfor %}"
    "{% if tools %}[tools]{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
CHAT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_DEFAULTS = {"temperature": 0.7, "top_k": 1, "max_new_tokens": 150, "do_sample": True}


def _call(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


CHAT_FACTS = (
    (
        "[user]\nWeather in Paris?\n[tools] get_weather get_time\n[assistant]\n",
        f"<think>\nParis, so I ask.\n</think>\n\n{_call('Paris')}",
    ),
    (
        "[user]\nWeather in Rome and Oslo?\n[tools] get_weather get_time\n[assistant]\n",
        f"<think>\nTwo cities.\n</think>\n\nLet me look.\n{_call('Rome')}\n{_call('Oslo')}",
    ),
    (
        "[user]\nHello!\n[tools] get_weather get_time\n[assistant]\n",
        "<think>\nA greeting.\n</think>\n\nHello, how can I help?",
    ),
    ("[user]\nHello!\n[assistant]\n", "<think>\nA greeting.\n</think>\n\nHello, how can I help?"),
)
"""Conversations as the template writes them, and the answers."""


@dataclass(frozen=True)
class MadeModels:
    """Folders in Hugging Face format; the adapters are for the Llama."""

    llama: Path
    adapters: tuple[Path, Path]
    embedding: Path
    cross_encoder: Path


def long_standin(environment: Path) -> Path:
    """Return a stand-in whose answers can last more than half a minute: for tests of what happens in the middle of one."""
    return _standin(environment, Recipe(positions=LONG_POSITIONS))


def llama(environment: Path) -> Path:
    """Return a stand-in of Llama's architecture."""
    return _standin(environment, Recipe(architecture="llama", hidden=128))


def chat(environment: Path, folder: Path) -> Path:
    """Make a model that thinks, calls tools and has defaults of its own."""
    request = {"chat": str(folder), "trainer": str(_TRAINER), "template": CHAT_TEMPLATE, "tokens": CHAT_TOKENS}
    request |= {"defaults": CHAT_DEFAULTS, "facts": CHAT_FACTS}
    run_reference(environment, "model_maker.py", request)
    return folder


def _standin(environment: Path, recipe: Recipe) -> Path:
    return ensure_standin(workspace_in(cache_root()), environment / "bin" / "python", recipe)


def models_in(folder: Path, environment: Path) -> MadeModels:
    """Return what `make_models` makes in a folder."""
    base = llama(environment)
    return MadeModels(base, (folder / "adapter_one", folder / "adapter_two"), folder / "embedding", folder / "cross_encoder")


def make_models(environment: Path, folder: Path) -> None:
    """Make a Llama with two LoRA adapters and two BERTs, with random weights but for the Llama's."""
    made = models_in(folder, environment)
    request = {name: [str(p) for p in value] if isinstance(value, tuple) else str(value) for name, value in asdict(made).items()}
    run_reference(environment, "model_maker.py", request)
