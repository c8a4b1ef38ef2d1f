"""Triton's entry points for a model served by vLLM.

Everything else is in the package ``triton_vllm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm.base.errors import ConfigError
from triton_vllm.request import contract

if TYPE_CHECKING:
    from triton_vllm.base.protocols import ModelConfig, TritonRequest


class TritonPythonModel:
    """The model class.

    Triton makes one object for each instance and calls its methods from one thread.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: ModelConfig) -> ModelConfig:
        """Return the configuration with the tensors that this model takes and returns."""
        # Triton calls this in a process of its own, which would import vLLM a second time.
        try:
            return contract.complete(auto_complete_model_config)
        except ConfigError as error:
            raise error.with_traceback(None) from None

    def initialize(self, args: dict[str, str]) -> None:
        """Import vLLM and load the model; Triton reports an exception as the load's failure."""
        # Imported here because `auto_complete_config` does not need it.
        from triton_vllm.service import Service

        try:
            self._service = Service(args)
        # Triton logs the frames of an exception three times. Those of a file's error say nothing.
        except ConfigError as error:
            raise error.with_traceback(None) from None

    def execute(self, requests: list[TritonRequest]) -> None:
        """Take requests; each is answered through its response sender, at once or later."""
        # A decoupled model must return None here (a rule of Triton's Python backend).
        for request in requests:
            self._service.accept(request)

    def is_ready(self) -> bool:
        """Return whether the engine can serve."""
        # Releases before 26.03 do not call this (python_backend, PR 430).
        return self._service.is_ready()

    def finalize(self) -> None:
        """End the engine with all its processes and threads."""
        self._service.close()
