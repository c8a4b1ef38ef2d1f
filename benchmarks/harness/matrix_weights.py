"""Give a checkpoint random weights: ``python matrix_weights.py FOLDER``.

The environment's Python runs this file. It knows the names of the model's weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# So large that two pictures lead to different answers.
_DEVIATION = 0.05


def main(folder: str) -> None:
    """Write ``model.safetensors`` for the folder's ``config.json``, which does not change."""
    import torch
    import transformers

    file = Path(folder) / "config.json"
    content = file.read_text("utf-8")
    (architecture,) = json.loads(content)["architectures"]
    torch.manual_seed(57)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for weights in model.parameters():
            # Vectors, such as norms and biases, stay as they are.
            if weights.dim() > 1:
                weights.normal_(0, _DEVIATION)
    model.to(torch.float16).save_pretrained(folder)
    # save_pretrained() has rewritten it with the names of this version of transformers. People's
    # checkpoints have those of older versions.
    file.write_text(content, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
