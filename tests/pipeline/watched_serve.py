# SPDX-License-Identifier: Apache-2.0
"""examples/serve.py, unchanged, with the allocator's own figures at /stats beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import serve
import torch
import uvicorn


def stats() -> dict[str, object]:
    free, total = torch.cuda.mem_get_info()
    return {**torch.cuda.memory_stats(), "device_free": free, "device_total": total}


def main() -> None:
    parser = serve.option_parser()
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    app = serve.create_app(serve.options_from(arguments))
    app.get("/stats")(stats)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
