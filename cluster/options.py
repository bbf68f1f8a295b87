"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.kv_format import Precision, StorageChoice
from kvtransfer.codecs import Wanted
from router.policies import PolicyName

Model = Annotated[
    str | None, typer.Option(help="Model folder or hub id; the demo model by default.")
]
ModelId = Annotated[str | None, typer.Option(help="Name that clients give the model.")]
Cluster = Annotated[str, typer.Option(help="Name of the cluster, one per user and name.")]
Host = Annotated[str, typer.Option(help="Address to listen on; loopback only.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of each engine.")]
KvTokens = Annotated[int | None, typer.Option(min=1, help="Tokens in each worker's KV pool.")]
MaxBatch = Annotated[int, typer.Option(min=1, help="Sequences in a step.")]
PrefillChunk = Annotated[int, typer.Option(min=1, help="Prompt tokens in a step.")]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Longest context in tokens.")]
KvPrecision = Annotated[Precision, typer.Option(help="Of the KV cache, in the whole cluster.")]
KvPool = Annotated[
    StorageChoice, typer.Option(help="fp8: the KV pool holds bytes; wide: the model's type.")
]
KvCodec = Annotated[Wanted, typer.Option(help="KV on the wire; values are the same either way.")]
StepBudgetMs = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Milliseconds of a step in which streams wait for a prompt's chunk; 0: no bound. "
        "By default 50 on decode workers, none on prefill workers.",
    ),
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
LocalPrefill = Annotated[
    int, typer.Option(min=0, help="Uncached prompt tokens prefilled on the decode worker.")
]
Drain = Annotated[float, typer.Option(min=0, help="Seconds that running requests may take.")]
RoutingPolicy = Annotated[PolicyName, typer.Option(help="How workers are chosen.")]
TtftSlo = Annotated[float, typer.Option(min=1, help="Objective: ms to the first token.")]
TpotSlo = Annotated[float, typer.Option(min=1, help="Objective: ms for each further token.")]
AdmissionTtft = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Refuse requests whose first token is predicted later than this; "
        "10 times the objective by default.",
    ),
]
AdmissionQueue = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Refuse requests that are predicted to queue longer; below the objective, goodput "
        "lasts under overload. No bound by default.",
    ),
]
ApiKeys = Annotated[
    Path | None, typer.Option(help="YAML file of API keys and their tenants; any key without one.")
]
