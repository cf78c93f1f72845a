"""``shardwright plan``: find the fastest split of a model on a cluster and show it beside the usual recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli._found import advice_document, plan_document, print_advice, print_plan, print_serving
from shardwright.cli._like import Like, print_like, save_beside
from shardwright.cli._options import (
    AdviceOption,
    CutOption,
    ForbidOption,
    MaxAxesOption,
    MemoryOption,
    MicrobatchesOption,
    PinOption,
    RecomputeOption,
    ScheduleOption,
    StagesOption,
    check_numbers,
    check_seconds,
    pipelining,
)
from shardwright.cli._plans import TrustOption, build_model
from shardwright.cli._show import (
    bytes_text,
    console,
    finite,
    mesh_text,
    print_json,
    progress,
    seconds_text,
    table,
)
from shardwright.cli._sizing import cheapest, check_one_question, largest, show_answer, worth
from shardwright.cli._step import print_stages
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.planner.advising import Advice


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="gpt, gpt:layers=12,width=768, hf:gpt2, hf:config.json, file.py:function; or plan.json, to plan again "
            "as that was planned with further constraints"
        ),
    ],
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            help="8xH200, 4x8xA100-80GB, local:2 or a TOML file (that of plan.json otherwise); given several times: which "
            "is cheaper per token"
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size (the model's default otherwise)")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length, for models that have one")] = None,
    search: Annotated[str, typer.Option(help="auto, or a strategy by name: data-parallel, fsdp, megatron, …")] = "auto",
    optimizer: Annotated[str | None, typer.Option(help="adamw (unless plan.json says otherwise) or sgd")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16: the dtype of the parameters")] = None,
    max_axes: MaxAxesOption = 2,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    memory: MemoryOption = None,
    recompute: RecomputeOption = "auto",
    all_devices: Annotated[
        bool, typer.Option("--all-devices", help="Use every device, also where fewer of them are faster")
    ] = False,
    stages: StagesOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = "auto",
    cut: CutOption = None,
    batch_norm: Annotated[
        str,
        typer.Option(
            help="Statistics of batch norms in micro-batches: whole (refused with several), or per-piece: each its own"
        ),
    ] = "whole",
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver, per mesh")] = 10.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the plan's page here")] = None,
    frontier: Annotated[bool, typer.Option(help="Also show step time against memory per device")] = False,
    devices: Annotated[
        str | None,
        typer.Option(help="8..512 or 8,16,24: plan for each of these numbers of devices; how many are worth it"),
    ] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits")] = False,
    price: Annotated[
        list[str] | None, typer.Option(help="Of a device and hour, once or once for each --cluster: costs in money")
    ] = None,
    inference: Annotated[
        bool,
        typer.Option("--inference", help="Plan calls in evaluation mode: no backward pass, no optimizer, no labels"),
    ] = False,
    objective: Annotated[
        str | None,
        typer.Option(help="With --inference: latency (of one call, the default) or throughput (rows a second)"),
    ] = None,
    cache: Annotated[
        int, typer.Option(help="With --inference: positions in the cache of a Hugging Face decoder; --seq are new ones")
    ] = 0,
    like: Annotated[
        str | None,
        typer.Option(
            help="Another engine's configuration, as a plan beside ours: torchtitan's .toml, Megatron's .sh, DeepSpeed's "
            ".json, accelerate's .yaml, or hf for the model's tp_plan"
        ),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="With --like: change only what pays, and these not at all: tensor,pipeline")
    ] = None,
    advice: AdviceOption = False,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Find the fastest split of MODEL on CLUSTER.

    Example: shardwright plan gpt:layers=24,width=2048 --cluster 8xH200 --batch 64 -o plan.json
    And again from there: shardwright plan plan.json --pin 'head*=i0' -o other.json
    Whole jobs: shardwright plan gpt --cluster 8xH200 --devices 8..512; … --max-batch; … --cluster 8xH100 --price 2.5
    Serving: shardwright plan hf:gpt2 --cluster 2xH100 --inference --objective latency --batch 1 --cache 512
    As a pipeline: shardwright plan gpt:layers=24 --cluster 4xH100 --stages 4 --microbatches 16 --schedule zb-h1
    Beside what you have: shardwright plan hf:llama --cluster 8xH100 --like llama3_8b.toml --keep tensor -o plan.json
    """
    from dataclasses import replace

    from shardwright.cluster import parse_cluster
    from shardwright.cluster.calibrate import ensure_local
    from shardwright.errors import ShardwrightError
    from shardwright.files import check_writable, write
    from shardwright.frontend import capture
    from shardwright.planner import Options, beside_one_mesh, plan_jointly, plan_pipeline, plan_serving
    from shardwright.planner.advising import advise
    from shardwright.planner.joint import ALWAYS, NEVER, PROMISING
    from shardwright.planner.sizing import batch_and_tokens
    from shardwright.plans import Plan
    from shardwright.reports.steps import several_passes
    from shardwright.zoo.reference import resolve

    check_numbers(memory=memory, max_axes=max_axes)
    check_seconds(time_limit=time_limit)
    earlier = Plan.load(model) if model.endswith(".json") and not model.startswith("hf:") else None
    if earlier is None and not cluster:
        raise ShardwrightError("There is no cluster to plan for.", "Say --cluster 8xH200, for example.")
    check_one_question(
        devices is not None, max_batch, len(cluster or ()) > 1, others=frontier or advice or html is not None
    )
    rebuild = earlier is None or trust or (batch, seq, dtype) != (None, None, None) or earlier.captured is None
    if earlier is not None:
        optimizer = optimizer or earlier.optimizer
        pin, forbid = [*earlier.asked.pins, *(pin or ())], [*earlier.asked.forbidden, *(forbid or ())]
        if memory is None and earlier.asked.memory_limit is not None:
            memory = earlier.asked.memory_limit / 1e9
        if earlier.serving is not None:
            inference, objective = True, objective or earlier.serving.objective
            cache, batch = (
                cache or earlier.serving.cache,
                batch or (earlier.batch or 0) // earlier.serving.calls or None,
            )
        rebuild = rebuild or (inference and (earlier.serving is None or objective == "throughput"))
    several = any(x is not None for x in (stages, microbatches, devices)) or max_batch or frontier
    check_serving(inference, objective, cache, several or len(cluster or ()) > 1)
    theirs = _read_like(like, keep, model, inference or devices is not None or max_batch or len(cluster or ()) > 1)
    options = Options(
        search=search,
        optimizer=optimizer or "adamw",
        max_axes=max_axes,
        time_limit=time_limit,
        memory_limit=None if memory is None else memory * 1e9,
        pins=pin or (),
        forbidden=forbid or (),
        recompute=recompute,
        fewer_devices=not all_devices,
        batch_norm=batch_norm,
    )
    asked = pipelining(stages, microbatches, schedule, cut or [], batch_norm)
    if asked is not None and (frontier or devices is not None or max_batch or len(cluster or ()) > 1):
        raise ShardwrightError(
            "--frontier, --devices, --max-batch and a second --cluster know no pipelines.",
            "Leave them out, or plan without --stages.",
        )
    check_writable(output, html)

    def build(rows: int | None) -> Any:
        sizes: dict[str, Any] = {"batch": rows, "seq": seq, "dtype": dtype, "inference": inference, "cache": cache}
        return resolve(model, **sizes) if earlier is None else build_model(earlier, None, trust, **sizes)

    def captured(built: Any) -> Any:
        return capture(built.model, built.args, built.kwargs)

    with progress(as_json) as say:
        targets = []
        for name in cluster or ():
            ensure_local(name, report=lambda share, what: say(f"measuring this machine, once: {share:.0%}, {what}"))
            targets.append(parse_cluster(name))
        targets = targets or [earlier.cluster]  # type: ignore[union-attr] # refused above where there is none
        target = targets[0]
        if theirs is not None and earlier is None:
            from shardwright.exchange.planning import rows_asked

            told = theirs.told
            batch, seq = batch or rows_asked(told, target.size), seq or told.length
            dtype = dtype or (told.precision if told.precision != "float32" else None)
        if earlier is not None and not rebuild:
            graph, reference = earlier.graph(), earlier.model
        else:
            say("building the model")
            resolved = build(batch)
            say("capturing the model")
            graph, reference = captured(resolved), resolved.name
        answer = joint = None
        if devices is not None:
            answer = worth(graph, target, devices, options, say)
        elif max_batch:
            answer = largest(lambda rows: captured(build(rows)), target, options, batch or 1, say)
        elif len(targets) > 1:
            answer = cheapest(graph, targets, options, price or (), say)
        elif inference:
            each = batch_and_tokens(graph)[0]
            found = plan_serving(
                lambda calls: graph if calls == 1 else captured(build(each * calls)),
                target,
                options,
                objective=objective or "latency",
                cache=cache,
                progress=say,
                reference=reference,
            )
            graph = found.graph()
            if found.serving is not None and found.serving.calls > 1:
                batch = each * found.serving.calls
        elif asked is not None:
            found = plan_pipeline(graph, target, asked, options, progress=say, reference=reference)
            found = beside_one_mesh(found, target, options, graph=graph, progress=say)
        else:
            pipelines = {"auto": ALWAYS, "none": NEVER}.get(stages or "", PROMISING)
            found, joint = plan_jointly(graph, target, options, progress=say, reference=reference, pipelines=pipelines)
        if theirs is not None:
            theirs.follow(graph, target, options, reference, say)
            say("comparing both")
            theirs.compare(found, graph)
        advised: tuple[Advice, ...] = ()
        if advice and answer is None:
            say("simulating what could be changed")
            each = batch or batch_and_tokens(graph)[0]
            more = (lambda factor: captured(build(factor * each))) if rebuild and not inference else None
            advised = advise(found, graph, more)
        curve = _frontier(graph, target, options, found, joint, say) if frontier and answer is None else []
    if answer is not None:
        show_answer(answer, as_json)
        if output is not None and answer.best is not None and answer.best.plan is not None:
            rows = answer.best.batch if max_batch else batch
            replace(answer.best.plan, model=reference, batch=rows, sequence=seq, dtype=dtype).save(output)
        return
    if earlier is not None:
        batch, seq, dtype = batch or earlier.batch, seq or earlier.sequence, dtype or earlier.dtype
    found = replace(found, batch=batch, sequence=seq, dtype=dtype)
    beside: list[Path] = []
    if output is not None:
        found.save(output)
        if theirs is not None:
            beside = save_beside(theirs, output, batch=batch, sequence=seq, dtype=dtype)
    if html is not None:
        from shardwright.reports import plan_page

        write(html, plan_page(found, graph, file=output.name if output else "plan.json", advice=advised))
    if as_json:
        before = {} if earlier is None else {"before": vars(earlier.prediction)}
        before |= {} if theirs is None else {"like": theirs.document()}
        print_json(
            {
                **plan_document(found, graph),
                **before,
                **({"frontier": curve} if frontier else {}),
                **advice_document(advised),
            }
        )
        return
    print_plan(found, graph)
    if theirs is not None:
        print_like(theirs, found)
    if found.serving is not None:
        print_serving(found)
    if several_passes(found):
        print_stages(found)
    if earlier is not None:
        was = earlier.prediction.step_seconds
        console.print(
            f"The plan before took {seconds_text(was)}: this one takes {found.prediction.step_seconds / was:.2f}×."
        )
    if frontier:
        table(
            "Step time against memory per device",
            ["memory of a device", "simulated step", "mesh"],
            [[bytes_text(p["memory_bytes"]), seconds_text(p["step_seconds"]), mesh_text(p["mesh"])] for p in curve],
        )
    print_advice(advised)
    for path in (output, *beside, html):
        if path is not None:
            console.print(f"written to {path}")


def _read_like(like: str | None, keep: str | None, model: str, other: bool) -> Like | None:
    """The configuration that was named, read before any work."""
    if like is None:
        if keep is not None:
            raise ShardwrightError("--keep is about a configuration.", "Say --like FILE too.")
        return None
    if other:
        raise ShardwrightError(
            "--like is about one training step on one cluster.",
            "Leave out --inference, --devices, --max-batch and a second --cluster.",
        )
    from shardwright.exchange import read_configuration
    from shardwright.exchange.changing import check_kept

    kept = [name.strip() for name in (keep or "").split(",") if name.strip()]
    check_kept(kept)
    return Like(read_configuration(like, model), kept)


def _frontier(graph: Any, target: Any, options: Any, found: Any, joint: Any, say: Any) -> list[dict[str, Any]]:
    from shardwright.errors import Infeasible
    from shardwright.planner.frontier import frontier as curve
    from shardwright.planner.frontier import spanning
    from shardwright.reports.steps import several_passes

    whole = found if not several_passes(found) and found.devices == target.size else None
    try:
        flat = curve(graph, target, options, fastest=whole, progress=say)
    except Infeasible:  # on one mesh
        if joint is None:
            raise
        flat = []
    return [vars(point) | {"gap": finite(point.gap)} for point in spanning(flat, joint)]


def check_serving(inference: bool, objective: str | None, cache: int, others: bool) -> None:
    """Refuse what means nothing without ``--inference``, and questions that only training plans answer."""
    if not inference and (objective is not None or cache):
        raise ShardwrightError("--objective and --cache are about inference.", "Say --inference too.")
    if inference and others:
        raise ShardwrightError(
            "--stages, --microbatches, --devices, --max-batch, --frontier and a second --cluster are about training.",
            "Leave them out, or leave out --inference.",
        )
