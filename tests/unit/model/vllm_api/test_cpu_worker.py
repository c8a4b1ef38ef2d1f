"""On a CPU a request's random numbers can be wound back."""

from __future__ import annotations

from triton_vllm.vllm_api.cpu_worker import make_generator


class Generator:
    """As PyTorch's for CPUs: no offset; `draw` counts on from the seed."""

    def __init__(self, device):
        self.device, self._seed, self._next = device, 0, 0

    def manual_seed(self, seed):
        self._seed = self._next = seed
        return self

    def initial_seed(self):
        return self._seed

    def get_offset(self):
        raise RuntimeError("CPU Generator does not use offset")

    set_offset = get_offset

    def draw(self):
        self._next += 1
        return self._next


def test_what_was_drawn_for_half_a_prompt_is_drawn_again():
    """As on a GPU: the answer does not depend on how many steps its prompt took."""
    made = make_generator(Generator)(device="cpu").manual_seed(7)
    for _ in range(3):  # steps that read a part of the prompt
        assert made.draw() == 8
        made.set_offset(made.get_offset() - 4)
    assert [made.draw(), made.draw()] == [8, 9]
    assert isinstance(made, Generator)
