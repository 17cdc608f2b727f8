# SPDX-License-Identifier: Apache-2.0
"""What `instrument()` is given wrong: one line says which, and what is done instead; the server goes on."""

from __future__ import annotations

import pytest
import torch  # noqa: F401 - the rooms are wired only where torch is imported

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"meter_provider": 5},
         "meter_provider=5 (from an argument) is not a MeterProvider; the global one is used"),
        ({"tracer_provider": "otlp"},
         "tracer_provider='otlp' (from an argument) is not a TracerProvider; the global one is used"),
        ({"request_hook": 5}, "request_hook=5 (from an argument) is not a function; it is left out"),
        ({"excluded_metrics": ["torch.memory.usge"]},
         "excluded_metrics='torch.memory.usge' (from an argument) fits nothing; "
         "did you mean torch.memory.usage?"),
        ({"excluded_metrics": ["torch.memory.hst.*"]},
         "excluded_metrics='torch.memory.hst.*' (from an argument) fits nothing; "
         "did you mean torch.memory.host.*?"),
        ({"disabled_targets": "transfomers.*"},
         "disabled_targets='transfomers.*' (from an argument) fits nothing; did you mean transformers.*?"),
        ({"targets": "no colon"},
         "target no colon (from an argument) is not measured: a target is module:Class.method"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_name_and_the_rest_is_in_force(caplog, given, said):
    instrumentor = TorchMemInstrumentor()
    instrumentor.instrument(**given)
    try:
        lines = [record.getMessage() for record in caplog.records if "torchmem" in record.getMessage()]
        assert [line.removeprefix("torchmem: ").startswith(said) for line in lines] == [True], lines
        assert instrumentor.is_instrumented_by_opentelemetry
    finally:
        instrumentor.uninstrument()
