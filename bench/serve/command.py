"""`baton bench`: the commands. What is heavy is imported when one is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.serve.arrivals import Kind
from bench.serve.options import Endpoint
from protocol.errors import StartupError

if TYPE_CHECKING:
    from bench.serve.result import Result

app = typer.Typer(
    name="bench",
    help="Load on a server that speaks the OpenAI API, and what its clients see.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

LENGTH = "N, uniform:LOW-HIGH or lognormal:MEAN,SIGMA[,MAX]."
LOAD, LENGTHS, SERVER, OUTCOME = "Load (one of the first three)", "Lengths", "Server", "Result"


def _option(help_: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, **more)


Html = Annotated[Path | None, _option("Write a page with plots; it opens offline.", OUTCOME)]


@app.command()
def serve(
    url: Annotated[str, _option("Where it serves.", SERVER)] = "http://127.0.0.1:8000",
    model: Annotated[str, _option("Its name; auto: the first one served.", SERVER)] = "auto",
    endpoint: Annotated[Endpoint, _option("Of the API.", SERVER)] = "completions",
    api_key_env: Annotated[
        str | None, _option("The environment variable with the API key.", SERVER)
    ] = None,
    ca_file: Annotated[str | None, _option("Certificates to trust instead.", SERVER)] = None,
    rate: Annotated[float | None, _option("Requests per second, open loop.", LOAD)] = None,
    concurrency: Annotated[int | None, _option("Requests at a time, closed loop.", LOAD)] = None,
    trace: Annotated[str | None, _option("Mooncake's JSON lines, or Azure's .csv.", LOAD)] = None,
    arrivals: Annotated[Kind, _option("Of --rate.", LOAD)] = "poisson",
    burstiness: Annotated[
        float, _option("Shape of gamma: 1 is poisson, less comes in bursts.", LOAD)
    ] = 1.0,
    requests: Annotated[
        int | None, _option("So many; 100 without --duration or --trace.", LOAD)
    ] = None,
    duration: Annotated[float | None, _option("Seconds in which requests are sent.", LOAD)] = None,
    speedup: Annotated[float, _option("Of the trace's clock.", LOAD)] = 1.0,
    limit: Annotated[int | None, _option("Requests to read of the trace.", LOAD)] = None,
    max_in_flight: Annotated[int, _option("More wait, and are counted.", LOAD)] = 1024,
    warmup: Annotated[int, _option("Requests before, not counted.", LOAD)] = 4,
    seed: Annotated[int, _option("Of arrivals and lengths.", LOAD)] = 0,
    input_: Annotated[str, _option(f"Prompt tokens: {LENGTH}", LENGTHS, "--input")] = "128",
    output: Annotated[str, _option(f"Output tokens: {LENGTH}", LENGTHS)] = "64",
    mix: Annotated[str | None, _option("Instead: 0.75:128/64,0.25:1500/64.", LENGTHS)] = None,
    shared_prefix: Annotated[
        int, _option("Tokens of each prompt that it shares with its group.", LENGTHS)
    ] = 0,
    prefix_groups: Annotated[int, _option("How many prefixes there are.", LENGTHS)] = 1,
    trace_scale: Annotated[float, _option("Times the trace's lengths.", LENGTHS)] = 1.0,
    max_context: Annotated[
        int | None, _option("Cut the trace's requests to so many tokens.", LENGTHS)
    ] = None,
    ignore_eos: Annotated[
        bool, _option("Outputs are as long as asked.", LENGTHS, "--ignore-eos")
    ] = False,
    model_dir: Annotated[
        str | None, _option("A folder with tokenizer.json, for real prompts.", LENGTHS)
    ] = None,
    token_ids: Annotated[
        str, _option("Without --model-dir: draw ids from LOW-HIGH.", LENGTHS)
    ] = "100-4000",
    salt: Annotated[
        str, _option("Equal salts give equal prompts; fresh by default.", LENGTHS)
    ] = "",
    temperature: Annotated[float, _option("Of sampling.", SERVER)] = 0.0,
    extra_body: Annotated[str, _option("JSON object: more fields to send.", SERVER)] = "{}",
    timeout: Annotated[float, _option("Seconds for a whole request.", SERVER)] = 600.0,
    connect_timeout: Annotated[float, _option("Seconds to connect.", SERVER)] = 10.0,
    ttft_slo_ms: Annotated[float | None, _option("Objective for goodput.", OUTCOME)] = None,
    tpot_slo_ms: Annotated[float | None, _option("Objective for goodput.", OUTCOME)] = None,
    json_: Annotated[Path | None, _option("Write all figures.", OUTCOME, "--json")] = None,
    records: Annotated[
        bool, _option("Every request, too, in --json.", OUTCOME, "--records")
    ] = False,
    html: Html = None,
) -> None:
    """Send requests, measure at the client: TTFT, TPOT, ITL, throughput, goodput, errors.

    Times count from when a request was due. Ctrl-C ends the load and reports what there is.
    """
    import uvloop
    from rich.console import Console

    from bench.serve.options import Options
    from bench.serve.result import write
    from bench.serve.run import run

    try:
        options = Options(
            url=url,
            model=model,
            endpoint=endpoint,
            api_key_env=api_key_env,
            ca_file=ca_file,
            rate=rate,
            concurrency=concurrency,
            trace=trace,
            arrivals=arrivals,
            burstiness=burstiness,
            requests=requests,
            duration_s=duration,
            speedup=speedup,
            limit=limit,
            max_in_flight=max_in_flight,
            warmup=warmup,
            seed=seed,
            prompt=input_,
            output=output,
            mix=mix,
            shared_prefix=shared_prefix,
            prefix_groups=prefix_groups,
            trace_scale=trace_scale,
            max_context=max_context,
            ignore_eos=ignore_eos,
            model_dir=model_dir,
            token_ids=token_ids,
            salt=salt,
            temperature=temperature,
            extra_body=_object(extra_body),
            timeout_s=timeout,
            connect_timeout_s=connect_timeout,
            ttft_slo_ms=ttft_slo_ms,
            tpot_slo_ms=tpot_slo_ms,
        )
        found = uvloop.run(run(options, Console(stderr=True), keep_records=records))
        if json_ is not None:
            write(json_, found)
        _show([found], html)
    except StartupError as e:
        raise _failure(e) from None
    raise typer.Exit(130 if found.interrupted else 0 if found.summary.ok else 1)


@app.command()
def compare(
    results: Annotated[list[Path], typer.Argument(help="What --json wrote: one or more.")],
    html: Html = None,
) -> None:
    """Show results again, or beside each other."""
    from bench.serve.result import read

    try:
        _show([read(path) for path in results], html)
    except StartupError as e:
        raise _failure(e) from None


def _show(results: list[Result], html: Path | None) -> None:
    from rich.console import Console

    from bench.serve.show import print_comparison, print_result

    if len(results) == 1:
        print_result(Console(), results[0])
    else:
        print_comparison(Console(), results)
    if html is not None:
        from bench.serve.page import write_page

        write_page(html, results)
        typer.echo(f"page: {html}")


def _object(text: str) -> dict[str, Any]:
    """Raises StartupError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StartupError(f"--extra-body: expected a JSON object, not {text!r}")
    return found


def _failure(error: Exception) -> typer.Exit:
    for line in str(error).splitlines():
        typer.echo(f"baton bench: {line}", err=True)
    return typer.Exit(2)
