"""Triton's entry points for a model served by vLLM; everything else is in the package `triton_vllm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_vllm.request import contract

if TYPE_CHECKING:
    from triton_vllm.base.protocols import ModelConfig, TritonRequest


class TritonPythonModel:
    """Triton's Python backend makes one of these per instance and calls its methods from one thread."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: ModelConfig) -> ModelConfig:
        """Complete the model configuration. Runs in a process of its own, so vLLM is not imported here."""
        return contract.complete(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        """Import vLLM and load the model; what is raised here becomes Triton's reason for the failed load."""
        from triton_vllm.service import Service

        self._service = Service(args)

    def execute(self, requests: list[TritonRequest]) -> None:
        """Take requests; each is answered through its response sender, now or later."""
        for request in requests:
            self._service.accept(request)

    def is_ready(self) -> bool:
        """Tell Triton (26.03 and later) whether the engine can serve."""
        return self._service.is_ready()

    def finalize(self) -> None:
        """End the engine and every process and thread of it."""
        self._service.close()
