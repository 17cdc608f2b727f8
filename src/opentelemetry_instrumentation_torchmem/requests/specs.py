# SPDX-License-Identifier: Apache-2.0
"""Targets as they are written, by the user or in the table of built-in ones.

Light: every process with the launcher imports it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

ALLOWED = (
    "a target is module:Class.method, module:function, module:Net*.forward or __main__:Class.method, or a "
    "mapping of target and, if wanted, span, operation, nested, iterator"
)
SPANS = ("new", "enrich", "off")


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target as the user names it.

    Example:
        >>> TargetSpec("app.engine:Engine.stream", span="enrich", operation="chat")  # doctest: +ELLIPSIS
        TargetSpec(target='app.engine:Engine.stream', ...)
    """

    target: str
    """``module:Class.method`` and the like; the ``code.function.name`` of a built-in one says how that is
    measured: ``TargetSpec("transformers.GenerationMixin.generate", span="enrich")``."""
    span: str | None = None
    """``new``, ``enrich`` or ``off``; None for the default."""
    operation: str | None = None
    """``torch.operation``; None for the name of the function."""
    nested: bool = False
    """Whether it is measured inside another measured call too."""
    iterator: bool = False
    """Whether an iterator that it returns is followed to its end, as generators always are."""
    problem: str | None = None
    """What is wrong with it; such a one is logged and left out."""
    origin: str = ""
    """Where the user wrote it, for what is said of it."""

    @property
    def named(self) -> str:
        """It and where it was written, for the log."""
        return f"{self.target} (from {self.origin})" if self.origin else self.target

    @property
    def module(self) -> str:
        """The module whose import is waited for."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        """Where it is in the module."""
        return self.target.partition(":")[2]


def parse_targets(value: object) -> tuple[TargetSpec, ...]:
    """Targets from comma-separated text, or from a list of texts, mappings and ``TargetSpec``.

    One that is malformed stays in the result with its ``problem``, so that it costs only itself.

    Raises:
        ValueError: the value as a whole is neither text nor a list; the message says what is allowed.

    Example:
        >>> [spec.path for spec in parse_targets("app.engine:Engine.generate, app.model:Net*.forward")]
        ['Engine.generate', 'Net*.forward']
    """
    if isinstance(value, str):
        return tuple(_spec(name) for name in value.split(",") if name.strip())
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(f"comma-separated text or a list: {ALLOWED}")
    return tuple(_spec(entry) for entry in cast("Iterable[object]", value))


def _spec(entry: object) -> TargetSpec:
    options: dict[Any, Any] = {"target": entry}
    if isinstance(entry, TargetSpec):
        options = asdict(entry)
        del options["problem"], options["origin"]
    elif isinstance(entry, Mapping):
        options = dict(cast("Mapping[Any, Any]", entry))
    name: Any = options.pop("target", None)
    name = name.strip() if isinstance(name, str) else name
    if options.get("span") is False:
        options["span"] = "off"  # what YAML makes of a bare off
    problem = _problem(name, options)
    if problem is not None:
        return TargetSpec(name if isinstance(name, str) else repr(cast("object", entry)), problem=problem)
    return TargetSpec(name, **options)


def _problem(name: object, options: Mapping[Any, Any]) -> str | None:
    if not isinstance(name, str):
        return f"{ALLOWED}{_as_text(name)}"
    known = {field.name for field in fields(TargetSpec)} - {"target", "problem", "origin"}
    for option, value in options.items():
        if option not in known:
            return f"{option!r} is no option of a target ({', '.join(sorted(known))} are)"
        if option == "span" and value is not None and value not in SPANS:
            return f"span={value!r} is not allowed (one of {', '.join(SPANS)})"
        if option in ("nested", "iterator") and not isinstance(value, bool):
            return f"{option}={value!r} is not allowed (true or false)"
        if option == "operation" and not (value is None or (isinstance(value, str) and value.strip())):
            return f"operation={value!r} is not allowed (a name)"
    if any(name == row.label for row in BUILT_IN):
        return None
    module, _, path = name.partition(":")
    names = path.split(".")
    if not all(part.isidentifier() for part in (*module.split("."), names[-1])):
        return ALLOWED
    if not all(re.fullmatch(r"[\w*?\[\]!-]+", part) for part in names[:-1]):
        return ALLOWED
    last = names[-1]
    if last.startswith("__") and last.endswith("__") and last not in _SPECIAL:
        return f"of the special methods only {', '.join(_SPECIAL)} can be measured"
    return None


def _as_text(thing: object) -> str:
    """How a function that was given itself would be written."""
    path: str = getattr(thing, "__qualname__", "<")
    if not inspect.isroutine(thing) or "<" in path:
        return ""
    return f"; here {getattr(thing, '__module__', None)}:{path}, as a text"


_SPECIAL = ("__call__", "__init__", "__iter__", "__aiter__", "__next__", "__anext__")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A row for a target that needs no name: a method of a class and of all its subclasses."""

    module: str
    """Whose import it waits for: the one that defines the class, where the package imports lazily."""
    owner: str
    method: str
    operation: str
    told_as: str | None = None
    """The class under whose name it is told, where that is another one."""

    @property
    def label(self) -> str:
        """``code.function.name``: stays the same wherever a release keeps the class."""
        package = self.module.partition(".")[0]
        return f"{package}.{self.told_as or self.owner}.{self.method}"


BUILT_IN: tuple[BuiltIn, ...] = (
    BuiltIn("transformers.generation.utils", "GenerationMixin", "generate", "generate"),
    # SpeechT5, RAG, time series: models that generate without the mixin
    BuiltIn("transformers.modeling_utils", "PreTrainedModel", "generate", "generate", "GenerationMixin"),
    BuiltIn("transformers.generation.continuous_batching.continuous_api",
            "ContinuousMixin", "generate_batch", "generate"),
    BuiltIn("transformers.generation.continuous_batching.continuous_api",
            "ContinuousBatchingManager", "request_id_iter", "generate"),
    BuiltIn("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "__call__", "generate"),
    BuiltIn("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline", "__call__", "generate"),
    # these move from release to release, the top package always has them
    BuiltIn("sentence_transformers", "SentenceTransformer", "encode", "encode"),
    BuiltIn("sentence_transformers", "SparseEncoder", "encode", "encode"),
    BuiltIn("sentence_transformers", "MultiVectorEncoder", "encode", "encode"),
    BuiltIn("sentence_transformers", "CrossEncoder", "predict", "predict"),
    BuiltIn("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model", "step"),
    BuiltIn("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "execute_model", "step"),
    BuiltIn("vllm.worker.model_runner_base", "ModelRunnerBase", "execute_model", "step"),
    BuiltIn("sglang.srt.model_executor.model_runner", "ModelRunner", "forward", "step"),
)  # fmt: skip
BUILT_IN_LABELS = frozenset(row.label for row in BUILT_IN)
