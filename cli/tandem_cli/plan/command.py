"""`tandem plan MODEL`: the command line, and the steps from it to the answer."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console
from ruamel.yaml import YAML

from tandem_cli.options import SEED, command
from tandem_cli.profile.file import ProfileError, ProfileFile, read_profile
from tandem_contract.commandline import fail
from tandem_planner.fabrics import Fabric
from tandem_planner.sizing.deployments import CannotServe, Estimate
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.model_shape import ModelShape
from tandem_planner.sizing.search import Plan, Search, Target, Workload

from . import report
from .inputs import InputError, known_models, read_model, read_slo, read_workload
from .page import page, page_data
from .resources import resources
from .view import headline, view

_FABRICS: Final = {
    "nvlink": Fabric.NVLINK, "rdma": Fabric.RDMA, "pcie": Fabric.PCIE, "tcp": Fabric.TCP,
}  # fmt: skip
_RESOURCES: Final = {"mi300x": "amd.com/gpu"}
"""GPU → what nodes call it, where that is not `nvidia.com/gpu`."""
_WIDTH: Final = 160
"""Columns of a pipe, which has no width."""


@command("plan")
@click.argument("model")
@click.option("--gpu", type=click.Choice(list(GPUS)), required=True, help="Kind of GPU.")
@click.option(
    "--fabric",
    type=click.Choice(list(_FABRICS)),
    default="rdma",
    help="What KV moves over between prefill and decode pods.",
)
@click.option(
    "--workload",
    default="chat",
    help="A workload of tandem bench (chat, rag, code, batch, bimodal, fixed, shared-prefix), or a "
    "trace's file (Mooncake JSON lines or Azure CSV).",
)
@click.option("--prompt-tokens", type=click.IntRange(1), help="Mean tokens of a prompt.")
@click.option("--output-tokens", type=click.IntRange(1), help="Mean tokens of an answer.")
@click.option(
    "--long",
    type=click.FloatRange(0, 1),
    help="With --workload bimodal: share of long prompts.",
)
@click.option(
    "--slo",
    default="ttft=2s,itl=50ms",
    help="What a request must meet: time to first token, mean time between tokens, whole time "
    "(e2e).",
)
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    help="Share of the requests that must meet the SLO.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs to make the most of, instead of --rate.")
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    help="Share of a GPU's memory that an engine takes, as in vLLM.",
)
@click.option("--kv-cache-dtype", default="auto", help="Type of the KV cache, as in vLLM.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What tandem profile measured of this model on this GPU, instead of data sheets.",
)
@click.option("--seed", type=SEED, default=0, help="Of the workload; same seed, same answer.")
@click.option(
    "--render",
    "render_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the best deployment to this file, as custom resources.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the answer to this file as JSON; - prints it instead of the table.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page to this file that simulates both architectures, to try rates, pods, fabrics "
    "and objectives.",
)
def plan(
    *,
    model: str,
    gpu: str,
    fabric: str,
    workload: str,
    prompt_tokens: int | None,
    output_tokens: int | None,
    long: float | None,
    slo: str,
    attainment: float,
    rate: float | None,
    gpus: int | None,
    gpu_memory_utilization: float,
    kv_cache_dtype: str,
    profile_file: Path | None,
    seed: int,
    render_file: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Say how many pods of what a workload needs: separate prefill and decode pods, or co-located
    ones with chunked prefill, whichever takes fewer GPUs.

    MODEL is a directory with config.json, such a file, or the name of a known model. Nothing is
    downloaded, no GPU is needed. With --rate the cheapest deployment that meets the SLO is sought,
    with --gpus the one that serves most within it.

    Figures rest on data sheets and on what engines are assumed to reach of them; each has the
    bounds between which it lies. Exit status: 0 with an answer, 1 if there is none, 2 for wrong
    usage.
    """
    if (rate is None) == (gpus is None):
        raise click.UsageError("give --rate or --gpus, one of them")
    try:
        shape, weights = read_model(model)
        objective = Target(read_slo(slo), attainment)
        requests = read_workload(
            workload,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            long=long,
            seed=seed,
        )
    except InputError as err:
        fail(str(err), status=2)
    estimate = Estimate(
        shape,
        GPUS[gpu],
        _FABRICS[fabric],
        cache_dtype=kv_cache_dtype,
        utilization=gpu_memory_utilization,
        weights=weights,
    )
    longest = None
    if profile_file is not None:
        try:
            profile = read_profile(profile_file)
            estimate = _measured(estimate, profile, requests)
            longest = profile.fitted().longest_prompt
        except ProfileError as err:
            fail(f"{profile_file}: {err}", status=2)
    console = Console(stderr=True)
    with console.status("simulating") as status:
        search = Search(estimate, requests, objective, progress=status.update)
        try:
            plans = _plans(search, rate, gpus)
        except CannotServe as err:
            fail(f"{model}: {err}")
        options, shown = [], report.shown(plans)
        for each in shown:
            status.update(f"bounds of {each.deployment.gpus} GPUs")
            options.append(report.option(estimate, each, search.bounds(each)))
    answer = report.answer(
        model=_title(model),
        gpu=GPUS[gpu].title,
        fabric=_FABRICS[fabric],
        rate=rate,
        budget=gpus,
        estimate=estimate,
        workload=requests,
        objective=objective,
        plans=plans,
        options=options,
    )
    if render_file is not None:
        pools = resources(
            options[0],
            model=_title(model),
            gpu=gpu.upper(),
            resource=_RESOURCES.get(gpu, "nvidia.com/gpu"),
            objective=objective,
            utilization=gpu_memory_utilization,
            cache_dtype=kv_cache_dtype,
        )
        _write(render_file, pools, is_calibrated=answer.is_calibrated)
    _show(answer, json_file)
    if html_file is not None:
        try:
            data = page_data(
                estimate,
                [each.deployment for each in shown],
                model=_title(model),
                others=_others(model, estimate),
                longest=longest,
                rate=rate,
                slo=objective.slo,
                attainment=attainment,
                answer=f"For the {workload} workload that it was asked about, tandem plan found: "
                f"{headline(answer)}.",
            )
        except CannotServe as err:
            fail(f"--html {html_file}: no page: {err}")
        _write_text(html_file, page(data), "--html")


def _others(model: str, estimate: Estimate) -> dict[str, ModelShape]:
    """Known models other than `model`, by name; none beside a profile, which is of one."""
    if estimate.measured is not None:
        return {}
    return {name: read_model(name)[0] for name in known_models() if name != model.lower()}


def _measured(estimate: Estimate, profile: ProfileFile, workload: Workload) -> Estimate:
    """`estimate` with the steps of a profile. Raises ProfileError."""
    engine = profile.fitted()
    if reason := engine.unknown(max(r.prompt_tokens for r in workload.requests)):
        raise ProfileError(reason)
    if profile.held_out is None:
        raise ProfileError("how exact it is was not measured: run tandem profile to its end")
    return replace(
        estimate,
        measured=engine.step,
        measured_tensor=profile.tensor,
        measured_error=profile.held_out.largest,
        request=engine.request,
    )


def _plans(search: Search, rate: float | None, gpus: int | None) -> list[Plan]:
    """The plans, the best one first. Raises CannotServe."""
    if reason := search.impossible():
        raise CannotServe(f"no deployment meets the SLO: {reason}")
    plans = search.cheapest(rate) if rate is not None else search.most(gpus or 0)
    if not plans:
        raise CannotServe(
            "no deployment meets the SLO, though an idle one does: requests are too unequal. Allow "
            "more time, or a lower --attainment"
        )
    return plans


def _title(model: str) -> str:
    """The name of the repository of a known model, else what was given."""
    known = known_models().get(model.lower())
    return str(known["_source"]).partition(",")[0] if known else model


def _show(answer: report.Answer, json_file: Path | None) -> None:
    text = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    if json_file == Path("-"):
        click.echo(text)
        return
    if json_file is not None:
        _write_text(json_file, f"{text.decode()}\n", "--json")
    width = None if sys.stdout.isatty() else _WIDTH
    Console(width=width, markup=False, highlight=False).print(view(answer))


def _write_text(file: Path, text: str, flag: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as err:
        fail(f"{flag} {file}: {err.strerror}", status=2)


def _write(file: Path, pools: list[dict[str, object]], *, is_calibrated: bool) -> None:
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        with file.open("w") as stream:
            source = "a profile" if is_calibrated else "data sheets: nothing is calibrated"
            stream.write(f"# Written by tandem plan, from {source}.\n")
            yaml.dump_all(pools, stream)
    except OSError as err:
        fail(f"--render {file}: {err.strerror}", status=2)
