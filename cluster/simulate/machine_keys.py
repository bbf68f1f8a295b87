"""The scenario's section `machines`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from cluster.config.fields import Section

LARGEST = 1e9

Positive: TypeAlias = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, le=LARGEST)]


class MachineSection(Section):
    """By coefficients of its steps, as `baton status --json` has them; or by GPU and model, as
    `baton plan` takes them."""

    step: tuple[NotNegative, NotNegative, NotNegative, NotNegative, NotNegative] | None = None
    gpu: str | None = None
    model: str | None = None
    context: Positive = 2048.0  # tokens that a sequence holds while it decodes, with gpu and model
    compute: Annotated[float, Field(gt=0, le=1)] = 0.5  # of the GPU's figures, as in baton plan
    bandwidth: Annotated[float, Field(gt=0, le=1)] = 0.7
    weight_bytes: Literal[1, 2] = 2  # of a parameter, with gpu and model
    chunk: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    max_batch: Annotated[int, Field(ge=1, le=100_000)] = 64
    kv_tokens: Annotated[int | None, Field(ge=32, le=10**9)] = None
    kv_bytes: Positive | None = None
    link_gb_per_s: Positive | None = None

    @model_validator(mode="after")
    def _one_way(self) -> MachineSection:
        if (self.step is None) == (self.gpu is None or self.model is None):
            raise ValueError("expected step (five coefficients in seconds), or gpu and model")
        if self.step is not None and (self.kv_tokens is None or self.kv_bytes is None):
            raise ValueError("step wants kv_tokens and kv_bytes beside it")
        if self.step is not None and not any(self.step[:3]):
            raise ValueError("step: a step that decodes takes no time; expected one of 3 above 0")
        return self


class MachinesSection(Section):
    prefill: MachineSection
    decode: MachineSection | None = None  # as prefill's
    pace: Annotated[float, Field(ge=1, le=17)] = 1.0  # tokens of a sequence in a step: speculation
